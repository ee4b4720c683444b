"""M-RoPE positions that follow from the grid of a spec and a scale of time, against those of vLLM's own class. The law
`positions` has those of the gallery, against transformers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from vllm.model_executor.models.interfaces import supports_mrope
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.multimodal.inputs import PlaceholderRange

from mmkit import (
    Modality,
    ModelSpec,
    MultiModalModel,
    Tensor,
    batched,
    between,
    cfg,
    embed,
    fields,
    later,
)
from mmkit.model.mrope import get_mrope_input_positions
from tests.unit.common import make_modality

START, END, IMAGE, VIDEO = 1, 2, 3, 4
MERGE = 2
VISION = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=25)
CONFIG = SimpleNamespace(
    vocab_size=100, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END, vision_config=VISION
)


def media(name: str, token: int, *scale: Any) -> Modality:
    """A modality as Qwen2.5-VL has it: processed elsewhere, sized by its grid of patches."""
    grid = fields[f"{name}_grid_thw"]
    t, h, w = grid[0], grid[1] // cfg.vision_config.spatial_merge_size, grid[2] // cfg.vision_config.spatial_merge_size
    declared = {f"{name}_grid_thw": batched(), **({"second_per_grid_ts": batched()} if scale else {})}
    known = {f"{name}_grid_thw": torch.tensor([1, MERGE, MERGE]), "second_per_grid_ts": torch.tensor(1.0)}
    return make_modality(
        name,
        item=Tensor((between(1, 4),)),
        layout=embed(token) * (t * h * w),
        fields=declared,
        process=lambda items, scope: {key: [known[key].clone() for _ in items] for key in declared},
        positions=(t, h, w, *scale),
    )


SECONDS = later(float)(fields.second_per_grid_ts) * cfg.vision_config.tokens_per_second
SPEC = ModelSpec("qwen2_5_vl", media("image", IMAGE), media("video", VIDEO, SECONDS))
SIDES = st.integers(1, 5)
IMAGES = st.tuples(st.just("image"), st.just(1), SIDES, SIDES)
VIDEOS = st.tuples(st.just("video"), st.integers(1, 4), SIDES, SIDES)
SCALES = st.sampled_from([1.0, 0.5, 2.0, 0.04, 1 / 3, 0.7])


@given(sent=st.lists(st.tuples(st.integers(0, 3), IMAGES | VIDEOS, SCALES), max_size=5), rest=st.integers(0, 3))
def test_as_vllms_own_class(sent: Any, rest: int) -> None:
    plan = SPEC.bind(CONFIG)
    tokens: list[int] = []
    features: list[Any] = []
    for text, (kind, t, h, w), seconds in sent:
        own = plan.modalities[kind]
        data = {f"{kind}_grid_thw": torch.tensor([t, h * MERGE, w * MERGE])}
        if kind == "video":
            data["second_per_grid_ts"] = torch.tensor(seconds)
        layout = own.layout_evaluator.evaluate(own.scopes.make(SimpleNamespace(), 0, data)).tokens
        tokens += [60] * text + [START]
        place = PlaceholderRange(len(tokens), len(layout), layout.is_embed)
        elements = {key: SimpleNamespace(data=value) for key, value in data.items()}
        features.append(SimpleNamespace(modality=kind, mm_position=place, data=elements))
        tokens += [*layout.ids, END]
    tokens += [60] * rest or [60]
    model: Any = SimpleNamespace(mm_plan=plan)
    positions, delta = get_mrope_input_positions(model, tokens, features[::-1])
    cls: Any = Qwen2_5_VLForConditionalGeneration
    theirs = SimpleNamespace(config=CONFIG)
    theirs.iter_mm_grid_thw = lambda features: cls.iter_mm_grid_thw(theirs, features)
    expected, their_delta = cls.get_mrope_input_positions(theirs, tokens, features)
    np.testing.assert_array_equal(positions, expected)
    assert (positions.dtype, delta) == (torch.int64, their_delta)


def test_vllm_sees_them_where_the_spec_has_them() -> None:
    class Encoders(MultiModalModel, nn.Module):
        def embed_image(self, **fields: Any) -> Any: ...
        def embed_video(self, **fields: Any) -> Any: ...

    with_grid, own = type("WithGrid", (Encoders,), {}), type("Own", (Encoders,), {"get_mrope_input_positions": len})
    plain = [own.model_copy(update={"positions": None}) for own in SPEC.modalities]
    without = SPEC.model_copy(update={"modalities": plain}).register(type("Without", (Encoders,), {}))
    assert not supports_mrope(without)
    assert supports_mrope(SPEC.register(with_grid))
    assert SPEC.register(own).get_mrope_input_positions is len
