"""The action of examples/vla, compared with OpenVLA's own arithmetic on a config in the form of a published one."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.vla.checkpoint import STATISTICS
from examples.vla.spec import VLA
from mmkit import InputError, SpecError
from tests.profiles import scaled

from .common import Tokenizer, expect_refusal

EMPTY, FIRST, PADDING = 29871, 31744, 32000
TOWN = STATISTICS["town"]


class LlamaLike(Tokenizer):
    def get_vocab(self) -> dict[str, int]:
        return {"<image>": 7, "▁": EMPTY}


def config(**changes: Any) -> Any:
    """What the config of a published checkpoint says: 32,000 tokens, and 64 rows of padding."""
    text_config = SimpleNamespace(vocab_size=32064, hidden_size=64)
    values = {
        "vision_config": SimpleNamespace(image_size=56, patch_size=14),
        "vision_feature_select_strategy": "default",
        "image_token_index": 7,
        "text_config": text_config,
        "get_text_config": lambda: text_config,
        "norm_stats": STATISTICS,
        "n_action_bins": 256,
        "pad_to_multiple_of": 64,
    }
    return SimpleNamespace(**{**values, **changes})


def bind(**changes: Any) -> Any:
    return VLA.bind(config(**changes), LlamaLike())


def predict(ids: list[int], statistics: dict[str, Any]) -> np.ndarray:
    """What `predict_action` makes of generated ids (openvla/openvla at c8f03f4)."""
    bins = np.linspace(-1, 1, 256)
    centres = (bins[:-1] + bins[1:]) / 2.0
    normalized = centres[np.clip(PADDING - np.array(ids) - 1, 0, centres.shape[0] - 1)]
    low, high = np.array(statistics["q01"]), np.array(statistics["q99"])
    mask = statistics.get("mask", np.ones_like(low, dtype=bool))
    return np.where(mask, 0.5 * (normalized + 1) * (high - low) + low, normalized)


@settings(max_examples=scaled(50))
@given(st.lists(st.integers(FIRST, PADDING - 1), min_size=7, max_size=7), st.booleans())
def test_an_action_is_that_of_openvla(ids: list[int], is_masked: bool) -> None:
    of_actions = TOWN["action"] if is_masked else {key: TOWN["action"][key] for key in ("q01", "q99")}
    output = bind(norm_stats={"town": {"action": of_actions}}).outputs["action"]
    action = output.decode(ids)
    np.testing.assert_allclose(action, predict(ids, of_actions), rtol=0, atol=1e-12)
    assert (output.decode(output.encode(action)) == action).all()


def test_an_encoded_action_has_the_ids_of_the_training() -> None:
    """OpenVLA's tokenizer subtracts the bin's number, from 1 on, from the size of the vocabulary."""
    output = bind().outputs["action"]
    low, high = np.array(TOWN["action"]["q01"]), np.array(TOWN["action"]["q99"])
    low[-1], high[-1] = -1.0, 1.0
    assert output.encode(low) == [PADDING - 1] * 7
    assert output.encode(high) == [FIRST] * 7
    expect_refusal(
        InputError, "vla.outputs.action: expected an array that the output can be, got …", output.encode, 2 * high
    )


def test_rows_of_padding_are_no_actions() -> None:
    output = bind().outputs["action"]
    assert set(output.allowed) == {range(FIRST, PADDING)}
    remedy = "Check where the output begins, and that sampling was confined to it."
    sentence = f"vla.outputs.action[0]: expected an id from {FIRST} to {PADDING - 1}, got {PADDING}. {remedy}"
    expect_refusal(InputError, sentence, output.decode, [PADDING] * 7)
    with pytest.raises(SpecError, match="pad_to_multiple_of has no value"):
        VLA.bind(SimpleNamespace(**{k: v for k, v in vars(config()).items() if k != "pad_to_multiple_of"}), LlamaLike())


def test_a_data_set_is_named_where_there_are_several() -> None:
    several = {"town": TOWN, "farm": {"action": {"q01": [0.0], "q99": [1.0]}}}
    with pytest.raises(SpecError, match="unnorm_key is None; norm_stats has the data sets town, farm"):
        bind(norm_stats=several)
    assert bind(norm_stats=several, unnorm_key="farm").outputs["action"].num_tokens == 1
    assert bind(norm_stats=several, unnorm_key="town").outputs["action"].num_tokens == 7
    with pytest.raises(SpecError, match="unnorm_key is 'sea'"):
        bind(norm_stats=several, unnorm_key="sea")


def test_a_prompt_ends_with_the_empty_token_once() -> None:
    plan = bind()
    assert plan.rewrite("prompt", [5, 6]) == [5, 6, EMPTY]
    assert plan.rewrite("prompt", [5, 6, EMPTY]) == [5, 6, EMPTY]
