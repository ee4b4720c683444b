"""PointLLM reads a cloud of coloured points and answers questions about the object.

Source: https://github.com/OpenRobotLab/PointLLM at 77bf64c, paper arXiv 2308.16911. The repository has no licence file.
"""

from collections.abc import Sequence

import torch

from mmkit import Modality, ModelSpec, Scope, Tensor, batched, between, cfg, embed, replace, tok, where

COORDINATES = 3
COLOURS = 3


def normalise(items: Sequence[torch.Tensor], scope: Scope) -> dict[str, list[torch.Tensor]]:
    """Move the points of each cloud (points, 6) around zero, within a sphere of radius 1; colours stay."""
    clouds = []
    for cloud in items:
        coordinates = cloud[:, :COORDINATES]
        coordinates = coordinates - coordinates.mean(0)
        radius = coordinates.square().sum(1).sqrt().max()
        clouds.append(torch.cat([coordinates / radius, cloud[:, COORDINATES:]], dim=1))
    return {"point_clouds": clouds}


PATCHES = embed(tok[cfg.DEFAULT_POINT_PATCH_TOKEN]) * cfg.point_token_len
START = tok[cfg.DEFAULT_POINT_START_TOKEN]
END = tok[cfg.DEFAULT_POINT_END_TOKEN]

POINTLLM = ModelSpec(
    "pointllm",
    Modality(
        "point",
        item=Tensor((between(cfg.num_group, cfg.max_points), COORDINATES + COLOURS)),
        process=normalise,
        fields={"point_clouds": batched(dtype="float32")},
        layout=where(cfg.mm_use_point_start_end, START + PATCHES + END, PATCHES),
        update=replace(tok["<point>"]),
    ),
)
