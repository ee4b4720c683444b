"""M-RoPE positions that follow from the grid of a spec and a scale of time, against those of vLLM's own class.

The law `positions` has those of the gallery, against transformers.
"""

from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

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

START = 1
END = 2
IMAGE = 3
VIDEO = 4
WORD = 60
MERGE = 2
CONFIG = SimpleNamespace(
    vocab_size=100,
    video_token_id=VIDEO,
    vision_start_token_id=START,
    vision_end_token_id=END,
    vision_config=SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=25),
)

# -- a spec as Qwen2.5-VL has it ---------------------------------------------------------------------------------------


def visual(name: str, token: int, *, scale: Any = None) -> Modality:
    """Return a modality that is processed elsewhere, and sized by its grid of patches.

    Args:
        name: image or video.
        token: the placeholder id.
        scale: the expression for the scale of time; None for none.
    """
    grid = fields[f"{name}_grid_thw"]
    merge = cfg.vision_config.spatial_merge_size
    sizes = (grid[0], grid[1] // merge, grid[2] // merge)
    time, height, width = sizes
    values = {f"{name}_grid_thw": torch.tensor([1, MERGE, MERGE])}
    positions: tuple[Any, ...] = sizes
    if scale is not None:
        values["second_per_grid_ts"] = torch.tensor(1.0)
        positions = (time, height, width, scale)

    def process(items: Any, scope: Any) -> dict[str, Any]:
        return {key: [value.clone() for _ in items] for key, value in values.items()}

    return make_modality(
        name,
        item=Tensor((between(1, 4),)),
        layout=embed(token) * (time * height * width),
        fields={key: batched() for key in values},
        process=process,
        positions=positions,
    )


SECONDS = later(float)(fields.second_per_grid_ts) * cfg.vision_config.tokens_per_second
SPEC = ModelSpec("qwen2_5_vl", visual("image", IMAGE), visual("video", VIDEO, scale=SECONDS))


# -- the positions of vLLM ---------------------------------------------------------------------------------------------


class DrawnItem(NamedTuple):
    """An item with the words before it.

    Attributes:
        words: their number.
        modality: image or video.
        grid: time, height and width in merged patches.
        seconds: between two frames of a video.
    """

    words: int
    modality: str
    grid: tuple[int, int, int]
    seconds: float


SIDES = st.integers(1, 5)
SECONDS_PER_GRID = st.sampled_from([1.0, 0.5, 2.0, 0.04, 1 / 3, 0.7])
IMAGES = st.builds(
    DrawnItem, st.integers(0, 3), st.just("image"), st.tuples(st.just(1), SIDES, SIDES), SECONDS_PER_GRID
)
VIDEOS = st.builds(
    DrawnItem, st.integers(0, 3), st.just("video"), st.tuples(st.integers(1, 4), SIDES, SIDES), SECONDS_PER_GRID
)


@given(items=st.lists(IMAGES | VIDEOS, max_size=5), words_at_end=st.integers(0, 3))
def test_positions_are_those_of_vllms_own_class(items: list[DrawnItem], words_at_end: int) -> None:
    plan = SPEC.bind(CONFIG)
    tokens: list[int] = []
    features: list[Any] = []
    for drawn in items:
        tokens += [WORD] * drawn.words + [START]
        layout = evaluate_layout(plan, drawn)
        place = PlaceholderRange(len(tokens), len(layout), layout.is_embed)
        elements = {key: SimpleNamespace(data=value) for key, value in make_fields(drawn).items()}
        features.append(SimpleNamespace(modality=drawn.modality, mm_position=place, data=elements))
        tokens += list(layout.ids) + [END]
    tokens += [WORD] * max(words_at_end, 1)
    model: Any = SimpleNamespace(mm_plan=plan)
    # the order of the features does not matter
    positions, delta = get_mrope_input_positions(model, tokens, features[::-1])
    expected, expected_delta = compute_expected_positions(tokens, features)
    np.testing.assert_array_equal(positions, expected)
    assert positions.dtype == torch.int64
    assert delta == expected_delta


def evaluate_layout(plan: Any, drawn: DrawnItem) -> Any:
    """Return the ids and the mask of an item."""
    modality_plan = plan.modalities[drawn.modality]
    scope = modality_plan.scopes.make(SimpleNamespace(), 0, make_fields(drawn))
    return modality_plan.layout_evaluator.evaluate(scope).tokens


def make_fields(drawn: DrawnItem) -> dict[str, torch.Tensor]:
    """Return the fields of an item; vLLM's grid is in patches before they are merged."""
    time, height, width = drawn.grid
    data = {f"{drawn.modality}_grid_thw": torch.tensor([time, height * MERGE, width * MERGE])}
    if drawn.modality == "video":
        data["second_per_grid_ts"] = torch.tensor(drawn.seconds)
    return data


def compute_expected_positions(tokens: list[int], features: list[Any]) -> Any:
    """Return the positions of vLLM's class, called without a model."""
    model_class: Any = Qwen2_5_VLForConditionalGeneration
    model = SimpleNamespace(config=CONFIG)
    model.iter_mm_grid_thw = MethodType(model_class.iter_mm_grid_thw, model)
    return model_class.get_mrope_input_positions(model, tokens, features)


# -- model classes -----------------------------------------------------------------------------------------------------


class Encoders(MultiModalModel, nn.Module):
    """A model class that has no positions of its own."""

    def embed_image(self, **fields: Any) -> Any: ...
    def embed_video(self, **fields: Any) -> Any: ...


def test_vllm_sees_positions_of_a_spec_with_grids() -> None:
    assert supports_mrope(SPEC.register(type("WithGrid", (Encoders,), {})))


def test_vllm_sees_no_positions_of_a_spec_without_grids() -> None:
    modalities = [declared.model_copy(update={"positions": None}) for declared in SPEC.modalities]
    spec = SPEC.model_copy(update={"modalities": modalities})
    assert not supports_mrope(spec.register(type("WithoutGrid", (Encoders,), {})))


def test_positions_of_the_model_class_itself_stay() -> None:
    model_class = type("WithPositions", (Encoders,), {"get_mrope_input_positions": len})
    assert SPEC.register(model_class).get_mrope_input_positions is len
