"""What is wrong with a model class is said when it is registered, or by counts, and not by an engine that ends."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from mmkit import Modality, ModelSpec, MultiModalModel, SpecError, Tensor, batched, embed
from mmkit.errors import MmkitError
from mmkit.language.expr import Scope
from mmkit.language.layout import Layout
from mmkit.model.sound import get_unsound_items_metric
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
    class Odd(Derived):
        def embed_frames(self, frames: torch.Tensor) -> Any:
            return returned if isinstance(returned, torch.Tensor) else returned * len(frames)

    with pytest.raises(Violation) as refusal:
        check_law("counts", with_model(Odd), examples=20)
    assert f"MmkitError: mixed.frames, embed_frames{sentence}" in str(refusal.value)


OTHER_ROWS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "a row too few": lambda rows: [rows[0][1:], *rows[1:]],
    "a row too many": lambda rows: [torch.cat([rows[0], rows[0]]), *rows[1:]],
    "an item too few": lambda rows: rows[1:],
    "an item too many": lambda rows: [*rows, rows[0]],
    "another width": lambda rows: [rows[0][:, 1:], *rows[1:]],
    "integers": lambda rows: [rows[0].int(), *rows[1:]],
    "no tensor": lambda rows: [rows[0].tolist(), *rows[1:]],
    "nothing": lambda rows: None,
    "one tensor": torch.cat,
}


def test_rows_of_another_number_do_not_end_a_serving_engine() -> None:
    """While it starts, they do. Series have rows of their own number, frames all the same; the layout of one is a
    function."""

    def laid_out(scope: Scope) -> Layout:
        return embed(scope.tok["<pad>"]) * int(scope.fields.length)

    spoils: list[Callable[[list[torch.Tensor]], Any]] = [list]

    class Spoilt(Derived):
        def embed_series(self, values: torch.Tensor, length: Any, version: Any) -> Any:
            return spoils[0](list(super().embed_series(values, length, version)))

        def embed_frames(self, frames: torch.Tensor) -> Any:
            return spoils[0](list(super().embed_frames(frames)))

    def counted(name: str) -> float:
        return float(get_unsound_items_metric().labels(name)._value.get())

    opaque = MIXED.modalities[0].model_copy(update={"layout": laid_out})
    for spec in (MIXED, ModelSpec("mixed", opaque, *MIXED.modalities[1:])):
        subject = with_model(Spoilt, spec)
        values = {"series": [torch.ones(3, 2), torch.ones(2, 2)], "frames": [torch.ones(2, 3), torch.zeros(2, 3)]}
        prompt = [ID["<series>"]] * 2 + [ID["<frame>"]] * 2
        outcome = run(subject.processor, prompt, values, {})
        with load_model(subject.processor.info.ctx.model_config) as model:
            for (name, items), (what, spoil) in product(outcome.items.items(), OTHER_ROWS.items()):
                spoils[:] = [list]
                right, before = compute_rows(model, items), counted(name)
                spoils[:] = [spoil]
                model.mm_engine.cache_config.num_gpu_blocks = None
                with pytest.raises(MmkitError, match=f"mixed.{name}, embed_{name}"):
                    compute_rows(model, items)
                model.mm_engine.cache_config.num_gpu_blocks = 1
                got = compute_rows(model, items)
                spoilt = len(right) if what in ("an item too few", "an item too many", "nothing", "one tensor") else 1
                assert counted(name) == before + spoilt, (name, what)
                for i, (one, other) in enumerate(zip(got, right, strict=True)):
                    assert torch.equal(one, torch.zeros_like(other) if i < spoilt else other), (name, what, i)
                assert merge_rows(model, got).isfinite().all()


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
