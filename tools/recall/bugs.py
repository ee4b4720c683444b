"""The public bugs that are replayed, data alone; docs/data/recall.md tells of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Replay:
    """A law on vLLM's own processor, on a release with a bug and on one without it.

    Attributes:
        law: its name.
        checkpoint: an entry of the zoo of tools/survey.
        affected: a release that has the bug.
        fixed: a release that has it no more; None where every release up to the newest has it.
        message: a regular expression for what the law says.
        seconds: the most that the law may take on the affected release, imports included.
        drawn: changes of the entry: `modalities`, `kwargs`, `frames`, `side`.
        files: values in the JSON files of the checkpoint, by key.
        texts: more files.
        steps: those of the law `cache`; all if empty.
        container: of images; any if empty.
        most: items of each modality in one request; 0 for what vLLM takes.
        examples: of Hypothesis, at most.
    """

    law: str
    checkpoint: str
    affected: str
    fixed: str | None
    message: str
    seconds: int = 60
    drawn: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    container: str = ""
    most: int = 0
    examples: int = 60


IMAGE = {"modalities": ("image",), "kwargs": ()}
VIDEO = {"modalities": ("video",), "kwargs": ()}
NUM_FRAMES = {
    "modalities": ("video",),
    "frames": (8, 14),
    "kwargs": ({"num_frames": 5, "do_sample_frames": True, "fps": None},),
}
BEGIN = {"SpecialToken": {"id": "<s>", "type_id": 0}}
TEXT, PAIR = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
BEGINS_TEXTS = {
    "type": "TemplateProcessing",
    "single": [BEGIN, TEXT],
    "pair": [BEGIN, TEXT, PAIR],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
"""A tokenizer that begins every text with <s>."""

EVICTED = Replay(
    "cache",
    "qwen2_vl",
    "0.11.2",
    "0.12.0",
    "with a cache in (one process|two processes): AssertionError: Expected a cached item",
    # two of them fit into the smallest cache that these releases take, and three do not
    drawn={"modalities": ("image",), "kwargs": (), "side": (400, 440)},
    files={"longest_edge": 10**6},
    steps=("new", "seen before"),
    most=2,
    examples=160,
    seconds=60,
)
OFF_BY_STEPS = "timestamps and tokens_per_frame must have the same length"

REPLAYS = {
    1: EVICTED,
    2: Replay(
        "lost",
        "llava",
        "0.26.0",
        "0.28.0",
        "AssertionError: Expected a cached item",
    ),
    3: Replay(
        "shared",
        "llava",
        "0.33.0",
        None,
        "while another thread .*(Expected a cached item|MultiModalCacheMissError)",
    ),
    8: Replay("ranges", "qwen3_vl", "0.17.1", "0.18.1", OFF_BY_STEPS, drawn=NUM_FRAMES),
    9: Replay(
        "ranges",
        "qwen3_vl",
        "0.18.1",
        "0.19.1",
        OFF_BY_STEPS,
        drawn=VIDEO,
        files={"merge_size": 1, "spatial_merge_size": 1},
    ),
    10: Replay("reference", "qwen3_vl", "0.24.0", None, r"ids: \d+ and \d+ long", drawn=VIDEO),
    12: Replay("idempotence", "qwen2_vl", "0.33.0", None, r"\d+ ids became \d+"),
    13: Replay(
        "refusal", "qwen2_vl", "0.33.0", None, "one item of (image|video) too few: accepted"
    ),
    14: Replay(
        "identity",
        "qwen2_vl",
        "0.26.0",
        "0.27.1",
        "decoded on white and on black",
        drawn=IMAGE,
        container="float",
    ),
    16: Replay("names", "qwen2_vl", "0.33.0", None, "those that other items had", drawn=IMAGE),
    20: Replay(
        "doors",
        "qwen2_vl",
        "0.28.0",
        "0.30.0",
        r"ids of a text and, by LLM\.chat, the text '<s>.*': ids: \d+ and \d+ long",
        drawn=IMAGE,
        files={"post_processor": BEGINS_TEXTS},
    ),
    22: Replay(
        "reference",
        "gemma4",
        "0.33.0",
        None,
        r"ids: \d+ and \d+ long",
        drawn=IMAGE,
        files={"post_processor": BEGINS_TEXTS},
        texts={"chat_template.jinja": "{{ bos_token }}"},
    ),
    23: Replay(
        "doors",
        "qwen2_vl",
        "0.16.0",
        "0.30.0",
        "for the second request, of the server",
        drawn={**IMAGE, "kwargs": ({"images_kwargs": {"max_pixels": 56 * 56}},)},
    ),
    31: Replay(
        "doors",
        "qwen2_vl",
        "0.19.1",
        "0.30.0",
        r"LLM\.chat reads parts with the options \{\}",
        # in nearly every request, so that none shows bug 32 before
        drawn={**IMAGE, "kwargs": ({"max_pixels": 4 * 56 * 56},) * 9},
    ),
    32: Replay(
        "doors",
        "qwen2_vl",
        "0.28.0",
        "0.30.0",
        "with a cache and with none, items of one uuid: hashes",
        drawn=IMAGE,
    ),
}
"""By the numbers of the page."""
