"""What is wrong with a model class is said when it is registered, or by counts, and not by an engine that ends."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from mmkit import Modality, ModelSpec, MultiModalModel, SpecError, Tensor, batched, embed
from mmkit.errors import MmkitError
from mmkit.language.expr import Scope
from mmkit.language.layout import Layout
from mmkit.plan.containment import get_unsound_items_metric
from mmkit.testing import Violation, check_law
from mmkit.testing.vllm_model import compute_rows, load_model, merge_rows
from mmkit.testing.vllm_path import run
from tests.unit.common import expect_refusal

from .planted.base import HIDDEN, ID, MIXED, Derived, Encoders, with_model


class Series:
    def embed_series(self, values: Any, length: Any, version: Any) -> Any: ...


CLASSES: list[tuple[tuple[type, ...], dict[str, Any], str]] = [
    ((nn.Module,), {}, ": expected a multimodal model, got a class without MultiModalModel. Write class "
        "Robot(MultiModalModel, ...)."),
    ((Encoders, MultiModalModel), {}, ": expected MultiModalModel first among the bases, got Encoders before it, "
        "whose __init__ hides the mixin's. Write class Robot(MultiModalModel, ...)."),
    ((Series, MultiModalModel, nn.Module), {}, ": expected a method embed_frames(self, frames), got none."),
    ((Derived,), {"embed_series": lambda self, values, length: None}, ".embed_series: expected the fields (length, "
        "values, version) as parameters, got (values, length)."),
]  # fmt: skip


@pytest.mark.parametrize(("bases", "methods", "sentence"), CLASSES, ids=["no mixin", "second", "no encoder", "names"])
def test_a_class_that_cannot_run_the_spec(bases: tuple[type, ...], methods: dict[str, Any], sentence: str) -> None:
    expect_refusal(SpecError, f"mixed, Robot{sentence}", MIXED.register, type("Robot", bases, methods))


def test_raw_input_comes_to_forward() -> None:
    from mmkit.model.registration import check_class

    raw = ModelSpec("raw", Modality("image", item=Tensor((2,)), tokens=0, fields={"pixels": batched()}))

    class Robot(MultiModalModel, nn.Module):
        def forward(self, input_ids: Any, positions: Any, **fields: Any) -> Any: ...

    check_class(raw, Robot)
    Robot.forward = lambda self, input_ids, pixels, mask: None  # type: ignore
    sentence = "raw, Robot.forward: expected the fields (pixels) as parameters, got (input_ids, pixels, mask)."
    expect_refusal(SpecError, sentence, check_class, raw, Robot)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (
            torch.zeros(4, HIDDEN),
            ": expected a list of tensors, or one with a dimension for the items, got shape (4, 8). Return one (rows, "
            "hidden_size) tensor per item. `rows.split([...])` cuts one that holds them all.",
        ),
        ([torch.zeros(2, 7)], ", item 0: expected a floating (rows, 8) tensor, got shape (2, 7) of torch.float32."),
        ([torch.ones(2, 8).int()], ", item 0: expected a floating (rows, 8) tensor, got shape (2, 8) of torch.int32."),
        ([[0.0] * HIDDEN], ", item 0: expected a floating (rows, 8) tensor, got a list."),
    ],
)
def test_what_an_encoder_may_not_return(returned: Any, sentence: str) -> None:
    class ModelOfOtherRows(Derived):
        def embed_frames(self, frames: torch.Tensor) -> Any:
            return returned if isinstance(returned, torch.Tensor) else returned * len(frames)

    with pytest.raises(Violation) as refusal:
        check_law("counts", with_model(ModelOfOtherRows), examples=20)
    assert f"MmkitError: mixed.frames, embed_frames{sentence}" in str(refusal.value)


SPOILT_ITEMS = ["a row too few", "a row too many", "another width", "integers", "no tensor"]
"""Faults of the first item."""

SPOILT_BATCHES = ["an item too few", "an item too many", "nothing", "one tensor"]
"""Faults by which the rows of no item can be told from the others."""


def spoil(rows: list[torch.Tensor], fault: str) -> Any:
    """Return the rows of some items with a fault."""
    first = rows[0]
    further = rows[1:]
    match fault:
        case "a row too few":
            return [first[1:], *further]
        case "a row too many":
            return [torch.cat([first, first]), *further]
        case "another width":
            return [first[:, 1:], *further]
        case "integers":
            return [first.int(), *further]
        case "no tensor":
            return [first.tolist(), *further]
        case "an item too few":
            return further
        case "an item too many":
            return [*rows, first]
        case "one tensor":
            return torch.cat(rows)
        case "nothing":
            return None
    return rows


class SpoilingModel(Derived):
    """A model whose encoders have a fault."""

    fault = ""

    def embed_series(self, values: torch.Tensor, length: Any, version: Any) -> Any:
        return spoil(list(super().embed_series(values, length, version)), self.fault)

    def embed_frames(self, frames: torch.Tensor) -> Any:
        return spoil(list(super().embed_frames(frames)), self.fault)


def make_layout(scope: Scope) -> Layout:
    return embed(scope.tok["<pad>"]) * int(scope.fields.length)


WITH_LAYOUT_FUNCTION = ModelSpec(
    "mixed", MIXED.modalities[0].model_copy(update={"layout": make_layout}), *MIXED.modalities[1:]
)


def count_unsound_items(name: str) -> float:
    """Return the value of the metric for a modality."""
    return float(get_unsound_items_metric().labels(name)._value.get())


@pytest.mark.parametrize("spec", [MIXED, WITH_LAYOUT_FUNCTION], ids=["layout", "function"])
def test_rows_of_another_number_end_an_engine_that_starts_and_none_that_serves(spec: ModelSpec) -> None:
    """Series have rows of their own number, frames all the same."""
    subject = with_model(SpoilingModel, spec)
    values = {"series": [torch.ones(3, 2), torch.ones(2, 2)], "frames": [torch.ones(2, 3), torch.zeros(2, 3)]}
    prompt = [ID["<series>"], ID["<series>"], ID["<frame>"], ID["<frame>"]]
    outcome = run(subject.processor, prompt, values, {})
    with load_model(subject.processor.info.ctx.model_config) as model:
        for name, fault in product(outcome.items, SPOILT_ITEMS + SPOILT_BATCHES):
            items = outcome.items[name]
            model.fault = ""
            expected = compute_rows(model, items)
            count_before = count_unsound_items(name)
            model.fault = fault
            model.mm_engine.cache_config.num_gpu_blocks = None
            with pytest.raises(MmkitError, match=f"mixed.{name}, embed_{name}"):
                compute_rows(model, items)
            model.mm_engine.cache_config.num_gpu_blocks = 1
            results = compute_rows(model, items)
            num_spoilt = 1 if fault in SPOILT_ITEMS else len(expected)
            assert count_unsound_items(name) == count_before + num_spoilt, (name, fault)
            for i in range(num_spoilt):
                expected[i] = torch.zeros_like(expected[i])
            for result, tensor in zip(results, expected, strict=True):
                assert torch.equal(result, tensor), (name, fault)
            assert merge_rows(model, results).isfinite().all()


def test_a_class_that_is_its_own_language_model() -> None:
    class Whole(Encoders):
        def get_language_model(self) -> Any:
            return self

        def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.body.embed_input_ids(input_ids)

        def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return self.body.compute_logits(hidden_states)

    subject = with_model(type("Itself", (MultiModalModel, Whole), {}))
    for law in ("counts", "embeds", "safety"):
        check_law(law, subject, examples=5)


def test_placeholders_are_masked_in_the_logits_of_a_class_that_computes_them_itself() -> None:
    class WithLogits(Derived):
        def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.body.compute_logits(hidden_states)
            return logits

    class WithScaledLogits(WithLogits):
        def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().compute_logits(hidden_states) / 2

    for model in (WithLogits, WithScaledLogits):
        check_law("safety", with_model(model), examples=5)


def test_a_model_hides_the_logits_of_one_shard() -> None:
    """vLLM would sample from them, and pass by the mask of placeholder ids."""
    assert not hasattr(MultiModalModel.__new__(MultiModalModel), "compute_logits_local")
