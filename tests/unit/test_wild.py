"""The specs of examples/wild, compared with what the code of each model makes of drawn chats.

tests/night compares 400 of each, and asks engines.
"""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from examples.wild.biomed_rna import BIOMED_RNA
from mmkit import InputError
from tests.profiles import scaled
from tests.wild import biomed_rna
from tests.wild.compare import NAMES, compare_chat, draw_chat, open_model
from tools import wild


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_becomes_what_the_code_of_the_model_makes_of_it(name: str) -> None:
    opened = open_model(name)
    for number in range(scaled(5)):
        compare_chat(opened, draw_chat(opened, number))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pointllm", {"point_token_len": 6}),
        ("llaga", {"use_hop": 3}),
        ("opentslm", {"patch_size": 2}),
        ("ecg_byte", {"percentile_1": -2.0}),
    ],
)
def test_a_spec_that_does_otherwise_is_noticed(name: str, changes: dict[str, Any]) -> None:
    opened = open_model(name)
    config = opened.model.make_config(len(opened.tokenizer))
    for attribute, value in changes.items():
        setattr(config, attribute, value)
    processor = opened.model.spec.hf_processor(config, opened.tokenizer)
    with pytest.raises((AssertionError, InputError)):
        compare_chat(opened._replace(processor=processor), draw_chat(opened, 0))


NODES = torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("name", "item", "sentence"),
    [
        (
            "graphgpt",
            {"graph": {"graph_node": NODES, "edge_index": [[0], [3]]}},
            "graphgpt.graph[0].edge_index: expected int64 values from 0 to 2, got 3 at [1, 0].",
        ),
        (
            "llaga",
            {"graph": {"nodes": [0] * 12 + [-500], "embeddings": torch.zeros(13, 8)}},
            "llaga.graph[0].nodes: expected int64 values from -1 to 99, got -500 at [12].",
        ),
        ("onerec", {"video": [0, 16, 0]}, "onerec.video[0]: expected int64 values from 0 to 15, got 16 at [1]."),
        ("ecg_byte", {"ecg": np.full((2, 1), np.nan)}, "expected finite values"),
    ],
)
def test_an_item_that_the_model_cannot_read_is_refused(name: str, item: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        open_model(name).plan.parse_items(item)


def test_a_cell_reaches_the_model_as_the_plugin_sends_it() -> None:
    plan = BIOMED_RNA.bind(biomed_rna.BiomedRnaConfig())
    rng = random.Random(0)
    for _ in range(scaled(20)):
        cell = biomed_rna.draw_cell(rng)
        preview = plan.preview(biomed_rna.PROMPT, {"rna": cell})
        assert len(preview.prompt_token_ids) == 1
        (fields,) = preview.fields["rna"]
        expected = biomed_rna.read_cell(cell)
        assert fields.keys() == expected.keys()
        for name, value in expected.items():
            assert fields[name].dtype == value.dtype
            assert torch.equal(fields[name], value)


def test_a_recommendation_is_read_behind_what_the_model_thinks() -> None:
    opened = open_model("onerec")
    output = opened.plan.outputs["recommendation"]
    text = "<|sid_begin|><s_a_3><s_b_15><s_c_0><|sid_end|>"
    ids = opened.tokenizer("it is a, so b" + text).input_ids
    thought, recommendation = output.split_answer(ids)
    assert opened.tokenizer.decode(thought.ids) == "it is a, so b"
    assert recommendation.array.tolist() == [3, 15, 0]
    assert opened.tokenizer.decode(output.encode(np.array([3, 15, 0]))) == text


def test_the_page_has_what_was_measured() -> None:
    assert wild.PAGE.read_text(encoding="utf-8") == wild.write_page(wild.load_results())


def test_lines_of_a_method_are_counted() -> None:
    text = "class Model:\n    def run(self):\n        '''Do.'''\n\n        # why\n        return (1,\n            2)\n"
    assert wild.count_code_lines(wild.find_function(text, "Model.run")) == 3
    with pytest.raises(LookupError):
        wild.find_function(text, "Model.stop")
