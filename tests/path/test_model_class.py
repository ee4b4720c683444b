"""What is wrong with a model class is said when it is registered, or by counts, and not by an engine that ends."""

from typing import Any

import pytest
import torch
from torch import nn

from mmkit import Modality, ModelSpec, MultiModalModel, SpecError, Tensor, batched
from mmkit.testing import Violation, check_law
from tests.unit.common import refused

from .planted import HIDDEN, MIXED, Derived, _Encoders, with_model


class Series:
    def embed_series(self, values: Any, length: Any, version: Any) -> Any: ...


CLASSES: list[tuple[tuple[type, ...], dict[str, Any], str]] = [
    ((nn.Module,), {}, ": expected a multimodal model, got a class without MultiModalModel. Write class "
        "Robot(MultiModalModel, ...)."),
    ((_Encoders, MultiModalModel), {}, ": expected MultiModalModel first among the bases, got _Encoders before it, "
        "whose __init__ hides the mixin's. Write class Robot(MultiModalModel, ...)."),
    ((Series, MultiModalModel, nn.Module), {}, ": expected a method embed_frames(self, frames), got none."),
    ((Derived,), {"embed_series": lambda self, values, length: None}, ".embed_series: expected the fields (length, "
        "values, version) as parameters, got (values, length)."),
]  # fmt: skip


@pytest.mark.parametrize(("bases", "methods", "sentence"), CLASSES, ids=["no mixin", "second", "no encoder", "names"])
def test_a_class_that_cannot_run_the_spec(bases: tuple[type, ...], methods: dict[str, Any], sentence: str) -> None:
    refused(SpecError, f"mixed, Robot{sentence}", MIXED.register, type("Robot", bases, methods))


def test_raw_input_comes_to_forward() -> None:
    from mmkit.model.registration import check_class

    raw = ModelSpec("raw", Modality("image", item=Tensor((2,)), tokens=0, fields={"pixels": batched()}))

    class Robot(MultiModalModel, nn.Module):
        def forward(self, input_ids: Any, positions: Any, **fields: Any) -> Any: ...

    check_class(raw, Robot)
    Robot.forward = lambda self, input_ids, pixels, mask: None  # type: ignore
    sentence = "raw, Robot.forward: expected the fields (pixels) as parameters, got (input_ids, pixels, mask)."
    refused(SpecError, sentence, check_class, raw, Robot)


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


def test_a_class_that_is_its_own_language_model() -> None:
    class Whole(_Encoders):
        def get_language_model(self) -> Any:
            return self

        def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.body.embed_input_ids(input_ids)

        def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return self.body.compute_logits(hidden_states)

    subject = with_model(type("Itself", (MultiModalModel, Whole), {}))
    for law in ("counts", "embeds", "safety"):
        check_law(law, subject, examples=5)


def test_a_model_hides_the_logits_of_one_shard() -> None:
    """vLLM would sample from them, and pass by the mask of placeholder ids."""
    assert not hasattr(MultiModalModel.__new__(MultiModalModel), "compute_logits_local")
