"""Every stored output of vLLM's hand-written processors, through the specs that replace them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.oracles import SYSTEMS, differences, ids, replay

CASES = [(name, case) for name, system in SYSTEMS.items() for case in system.cases()]


def twin_of(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """The same request in its other form: as ids, or as text."""
    form, _, rest = case["id"].partition("/")
    other = {"text": "ids", "ids": "text"}[form]
    return next(c for n, c in CASES if n == name and c["id"] == f"{other}/{rest}")


def has_surplus(name: str, case: dict[str, Any]) -> bool:
    """Whether a prompt has more placeholders than items: some hand-written classes leave them to the model."""
    text = case["prompt"] if "prompt" in case else case["text"]
    return sum(map(text.count, SYSTEMS[name].markers)) > sum(map(len, case["items"].values()))


ENCODED: dict[str, Callable[[Any], int]] = {
    "fuyu": lambda item: len(item["image_patches"].data),
    "gemma3": lambda item: 16 * len(item["pixel_values"].data),
    "minicpmv": lambda item: 8 * len(item["pixel_values"].data),
    "pixtral_hf": lambda item: item["pixel_values"].data[0, ::16, ::16].numel(),
}
"""Encoder rows that the model makes of an item, where the hand-written class refuses it or counts without an option."""


def overlap(placed: dict[str, Any]) -> bool:
    """Whether the hand-written class has a token in the ranges of two items."""
    spans = sorted((p["offset"], p["offset"] + p["length"]) for places in placed.values() for p in places)
    return any(start < end for (_, end), (start, _) in pairwise(spans))


def is_padded(name: str, case: dict[str, Any]) -> bool:
    """Whether the hand-written class pads audio to the longest of the request, so that the others decide an item's
    features."""
    return name == "ultravox" and len({audio["samples"] for audio in case["items"].get("audio", [])}) > 1


def is_wrong(name: str, case: dict[str, Any]) -> bool:
    """Whether the hand-written class is wrong: as recorded, or because it contradicts itself, as its `origin.json`
    tells. A text and its ids are one request (the law L4), so the other form has the answer.
    """
    if "oracle_defect" in case or "suspect" in case:
        return True
    if has_surplus(name, case):
        return "expect" in case
    if is_padded(name, case):
        return True
    if "expect" in case and overlap(case["expect"]["placeholders"]):
        return True
    if name == "florence2" and "prompt" not in case:  # leaves <s> in the middle of the sentence of a task token
        return twin_of(name, case)["prompt"].startswith("<CAPTION_TO_PHRASE_GROUNDING>")
    if name == "qwen2_audio" and "prompt" in case:  # writes the tokens around a bare placeholder of a text alone
        return "<|AUDIO|>" in case["prompt"].replace("<|audio_bos|><|AUDIO|>", "")
    if name == "phi3v" and "prompt" in case:  # decodes a space after each special token of a text
        return re.search(r"<\|[a-z]+\|>", case["prompt"]) is not None
    if name == "paligemma" and "prompt" in case:  # writes another newline after that of a text
        return case["prompt"].endswith("\n")
    # refuses as text what it takes as ids
    return name == "qwen_vl" and "error" in case and "prompt" in case and "expect" in twin_of(name, case)


def described(wrong: bool) -> list[Any]:
    return [pytest.param(n, c, id=f"{n}/{c['id']}") for n, c in CASES if is_wrong(n, c) == wrong]


@pytest.mark.parametrize(("name", "case"), described(wrong=False))
def test_stored_case(name: str, case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(ValueError, match=r"^\w+\.(image|video|audio)[^ ]*: expected "):
            replay(name, case)
    else:
        assert not differences(case["expect"], replay(name, case), SYSTEMS[name].padded)


@pytest.mark.parametrize(("name", "case"), described(wrong=True))
def test_what_the_hand_written_class_gets_wrong(name: str, case: dict[str, Any]) -> None:
    if has_surplus(name, case):
        with pytest.raises(ValueError, match="placeholder"):
            replay(name, case)
        return
    twin = twin_of(name, case)
    got = replay(name, case)
    if name == "gemma3" and "expect" in case:  # the first of two images has the newlines between them
        assert ids(case["expect"]) == got["prompt_token_ids"]
        stored = {"placeholders": {}, "fields": case["expect"]["fields"]}
        assert not differences(stored, {"mm_placeholders": {}, "mm_kwargs": got["mm_kwargs"]})
        return
    if is_padded(name, case):
        for audio in (*case["expect"]["fields"]["audio"], *got["mm_kwargs"]["audio"]):
            del audio["audio_features"]
        assert not differences(case["expect"], got)
        return
    if not is_wrong(name, twin):
        assert not differences(twin["expect"], got)
        return
    # either form is wrong: it ignores an option of the request when it counts, or cannot place the item
    for placed, item in zip(got["mm_placeholders"]["image"], got["mm_kwargs"]["image"], strict=True):
        assert placed.is_embed.sum() == ENCODED[name](item)


def test_the_table_of_the_docs() -> None:
    """docs/gallery.md states the lines of each spec and the number of stored cases."""
    text = (Path(__file__).parents[2] / "docs" / "gallery.md").read_text()
    stated = re.findall(r"^\| \[.*?\]\(\.\./(.*?)\) \|[^|]*\| (\d+) \|[^|]*\|[^|]*\| (\d+) \|", text, re.MULTILINE)
    known = {}
    for name, system in SYSTEMS.items():
        path = Path(*("examples/" + system.spec.split(":")[0].replace(".", "/") + ".py").split("/"))
        known[str(path)] = code_lines(path.read_text()), sum(n == name for n, _ in CASES)
    assert {path: (int(lines), int(cases)) for path, lines, cases in stated} == known


def code_lines(source: str) -> int:
    """Lines that hold code, without imports and docstrings."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)
        for part in [node.body[0]] if documented else [node] if isinstance(node, (ast.Import, ast.ImportFrom)) else []:
            left_out |= set(range(part.lineno, part.end_lineno + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for t in tokens if t.type not in layout for n in range(t.start[0], t.end[0] + 1)}
    return len(lines - left_out)
