"""Compare a spec of examples/wild with the account of what the model's own code does."""

from __future__ import annotations

import random
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from mmkit.plan.plan import Plan, Preview

from .common import Expansion, Message, WildModel, collect_items

NAMES = (
    "pointllm",
    "llaga",
    "bioreason",
    "opentslm",
    "molca",
    "salmonn",
    "itformer",
    "graphgpt",
    "ecg_byte",
    "onerec",
    "molm_3d",
    "collm",
)


class OpenModel(NamedTuple):
    """A model with what a request needs."""

    model: WildModel
    tokenizer: Any
    config: Any
    processor: Any

    @property
    def plan(self) -> Plan:
        plan: Plan = self.processor.plan
        return plan


@cache
def open_model(name: str) -> OpenModel:
    """Bind the spec of a model to its tokenizer and config."""
    model: WildModel = import_module(f"tests.wild.{name}").MODEL
    tokenizer = model.make_tokenizer()
    config = model.make_config(len(tokenizer))
    return OpenModel(model, tokenizer, config, model.spec.hf_processor(config, tokenizer))


def draw_chat(opened: OpenModel, number: int) -> list[Message]:
    """Draw the chat with a number, the same each time."""
    return opened.model.draw(random.Random(f"{opened.model.spec.name} {number}"))


def render(opened: OpenModel, messages: list[Message]) -> str:
    """Return the prompt that the chat template of a model makes of a chat."""
    text: str = opened.processor.apply_chat_template(messages, add_generation_prompt=True)
    return text


def compare_chat(opened: OpenModel, messages: list[Message]) -> Expansion:
    """Compare what the spec and the model's own code make of a chat, and return what both make.

    Raises:
        AssertionError: they differ.
    """
    expected = opened.model.expand(opened.tokenizer, opened.config, messages)
    items = collect_items(messages)
    text = render(opened, messages)
    compare_preview(opened.plan.preview(text, items, add_special_tokens=False), expected)
    # a server adds what begins every text
    plain_text = text.removeprefix(opened.tokenizer.bos_token or "")
    assert opened.plan.preview(plain_text, items).prompt_token_ids == expected.ids, plain_text
    return expected


def compare_preview(preview: Preview, expected: Expansion) -> None:
    """Compare ids, the items whose rows stand at each position, and fields.

    Raises:
        AssertionError: they differ.
    """
    assert preview.prompt_token_ids == expected.ids
    sources: list[tuple[str, int] | None] = [None] * len(expected.ids)
    for placement in preview.placements:
        for offset, is_row in enumerate(placement.tokens.mask):
            if is_row:
                sources[placement.start + offset] = (placement.modality, placement.index)
    assert sources == expected.sources
    assert preview.fields.keys() == expected.fields.keys()
    for modality, items in expected.fields.items():
        for fields, expected_fields in zip(preview.fields[modality], items, strict=True):
            for name, value in expected_fields.items():
                assert fields[name].dtype == value.dtype, name
                assert fields[name].shape == value.shape, name
                np.testing.assert_allclose(fields[name].numpy(), value.numpy(), rtol=1e-5, atol=1e-6)
