"""The multimodal side of the model, all of it."""

from collections.abc import Sequence

import torch

from mmkit import Modality, ModelSpec, Scope, Tensor, batched, between, cfg, fields, replace, tok


def standardise(
    items: Sequence[torch.Tensor],
    scope: Scope,
) -> dict[str, list[torch.Tensor]]:
    """Bring each channel to mean 0 and deviation 1, over the training data."""
    means = torch.tensor(scope.cfg.means)
    deviations = torch.tensor(scope.cfg.deviations)
    return {"frames": [(item - means) / deviations for item in items]}


VOWELS = ModelSpec(
    "vowels",
    Modality(
        "recording",
        # what a caller may send: up to max_frames frames of 12 coefficients
        item=Tensor(shape=(between(1, cfg.max_frames), cfg.channels)),
        # how items become what the model receives
        process=standardise,
        fields={
            "frames": batched(
                shape=(between(1, cfg.max_frames), cfg.channels),
                dtype="float32",
            ),
        },
        # what one item becomes in the prompt: a position for every frame
        placeholder="<frame>",
        tokens=fields.frames.shape[0],
        # how it gets there: in place of the <recording> of the chat template
        update=replace(tok["<recording>"]),
    ),
)
