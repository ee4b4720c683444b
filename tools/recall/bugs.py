"""The public bugs, and what the kit does about each: data alone."""

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


@dataclass(frozen=True)
class Bug:
    """A public bug: replayed, rebuilt, or missed; one of the three says how.

    Attributes:
        issues: in vLLM's tracker, or another one.
        symptom: what people saw.
        replay: how the kit sees it in vLLM.
        rebuilt: the planted bug of tests/path/planted.py that has its cause.
        missed: why no law sees it.
    """

    issues: str
    symptom: str
    replay: Replay | None = None
    rebuilt: str = ""
    missed: str = ""


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

BUGS = {
    1: Bug("28525", "an item is evicted while its own request is processed", replay=EVICTED),
    2: Bug(
        "31404, 33865, 46354",
        "requests reach the two sides of the cache in different orders, or one of them only",
        Replay(
            "lost",
            "llava",
            "0.26.0",
            "0.28.0",
            "AssertionError: Expected a cached item",
        ),
    ),
    3: Bug(
        "38375, 50896",
        "the cache is changed by several threads",
        Replay(
            "shared",
            "llava",
            "0.33.0",
            None,
            "while another thread .*(Expected a cached item|MultiModalCacheMissError)",
        ),
    ),
    4: Bug(
        "24006, 47459, 47652, 50957",
        "Gemma 3n and 4: clips of different lengths in one encoder batch kill the engine",
        rebuilt="items_of_one_length",
    ),
    5: Bug(
        "31219",
        "concurrent `audio_embeds` of different lengths kill the engine",
        rebuilt="embeddings_of_one_length",
    ),
    6: Bug(
        "vllm-omni 7066",
        "MiniCPM-o: audio of 30 s and of 60 s in one batch",
        rebuilt="items_of_one_length",
    ),
    7: Bug(
        "47652",
        "Gemma 4 unified: one placeholder too many for some lengths",
        rebuilt="layout_longer_than_the_rows",
    ),
    8: Bug(
        "35909, 36136",
        "Qwen3-VL: `num_frames` without `fps` raises about timestamps",
        Replay("ranges", "qwen3_vl", "0.17.1", "0.18.1", OFF_BY_STEPS, drawn=NUM_FRAMES),
    ),
    9: Bug(
        "37439",
        "Qwen3-VL: timestamps are computed with merge_size",
        Replay(
            "ranges",
            "qwen3_vl",
            "0.18.1",
            "0.19.1",
            OFF_BY_STEPS,
            drawn=VIDEO,
            files={"merge_size": 1, "spatial_merge_size": 1},
        ),
    ),
    10: Bug(
        "46817",
        "Qwen3-VL: a video has other ids than in the processor of transformers",
        Replay("reference", "qwen3_vl", "0.24.0", None, r"ids: \d+ and \d+ long", drawn=VIDEO),
    ),
    11: Bug(
        "36332",
        "Qwen3-VL: `video_embeds` raise a KeyError",
        rebuilt="embeddings_that_raise",
    ),
    12: Bug(
        "36332, TRL 6294, TRL 6401",
        "ids that are expanded already are expanded again",
        Replay("idempotence", "qwen2_vl", "0.33.0", None, r"\d+ ids became \d+"),
    ),
    13: Bug(
        "57740",
        "a placeholder that a user types takes the image",
        Replay(
            "refusal", "qwen2_vl", "0.33.0", None, "one item of (image|video) too few: accepted"
        ),
    ),
    14: Bug(
        "49975",
        "the hash ignores options of decoding",
        Replay(
            "identity",
            "qwen2_vl",
            "0.26.0",
            "0.27.1",
            "decoded on white and on black",
            drawn=IMAGE,
            container="float",
        ),
    ),
    15: Bug("54548", "`is_embed` is lost between render and generate", rebuilt="mask_lost"),
    16: Bug(
        "55546, 55547, 53471, 57696",
        "the client's uuid is the only key of the cache: stale features",
        Replay("names", "qwen2_vl", "0.33.0", None, "those that other items had", drawn=IMAGE),
    ),
    17: Bug(
        "38459, 38465",
        "the encoder cache is sized without `limit_mm_per_prompt`",
        missed="`worst_case` asks about one item; what many of them cost is never compared",
    ),
    18: Bug(
        "26223, 33110",
        "an item longer than the encoder cache: the scheduler spins",
        rebuilt="stated_maximum_too_small",
    ),
    19: Bug(
        "36814",
        "the dummy video ignores `num_frames`: a longer one is refused",
        rebuilt="stated_maximum_too_small",
    ),
    20: Bug(
        "55197, 55288",
        "`LLM.chat()` begins a text twice",
        Replay(
            "doors",
            "qwen2_vl",
            "0.28.0",
            "0.30.0",
            r"ids of a text and, by LLM\.chat, the text '<s>.*': ids: \d+ and \d+ long",
            drawn=IMAGE,
            files={"post_processor": BEGINS_TEXTS},
        ),
    ),
    21: Bug("50899", "the Transformers backend tokenises twice", rebuilt="text_begun_twice"),
    22: Bug(
        "52304, 38826, 39842",
        "Gemma 4 loses the first token of raw text",
        Replay(
            "reference",
            "gemma4",
            "0.33.0",
            None,
            r"ids: \d+ and \d+ long",
            drawn=IMAGE,
            files={"post_processor": BEGINS_TEXTS},
            texts={"chat_template.jinja": "{{ bos_token }}"},
        ),
    ),
    23: Bug(
        "36431",
        "the server's `mm_processor_kwargs` are emptied by the first request",
        Replay(
            "doors",
            "qwen2_vl",
            "0.16.0",
            "0.30.0",
            "for the second request, of the server",
            drawn={**IMAGE, "kwargs": ({"images_kwargs": {"max_pixels": 56 * 56}},)},
        ),
    ),
    24: Bug(
        "30776, 30884, vllm-omni 1228, 2094, 2098",
        "`use_audio_in_video` and a partial cache hit",
        missed="its tiny checkpoint does not load under transformers 4, so no law ran on it",
    ),
    25: Bug(
        "47788",
        "the start fails: dummy data of one modality at a time",
        rebuilt="dummy_of_several_modalities",
    ),
    26: Bug(
        "44911",
        "Devstral does not start: its dummy data do not fit their prompt",
        missed="its tokenizer has no tiny form here; the Mistral 3 of the survey starts on 0.22.1",
    ),
    27: Bug(
        "48413",
        "MiniCPM-V: placeholders are other ids under transformers 5",
        rebuilt="ids_that_are_not_the_layout",
    ),
    28: Bug(
        "51827",
        "the Transformers backend slices Idefics3's fields along the wrong dimension",
        rebuilt="split_along_another_dimension",
    ),
    29: Bug("16229, 15764", "the model generates a placeholder", rebuilt="placeholders_sampled"),
    30: Bug(
        "vllm-omni 7509, 7510",
        "a mask takes `<audio_bos>` for an embedding",
        rebuilt="literal_in_the_mask",
    ),
    31: Bug(
        "40134",
        "`LLM.chat` drops `mm_processor_kwargs`",
        Replay(
            "doors",
            "qwen2_vl",
            "0.19.1",
            "0.30.0",
            r"LLM\.chat reads parts with the options \{\}",
            # in nearly every request, so that none shows bug 32 before
            drawn={**IMAGE, "kwargs": ({"max_pixels": 4 * 56 * 56},) * 9},
        ),
    ),
    32: Bug(
        "56432",
        "explicit uuids are replaced",
        Replay(
            "doors",
            "qwen2_vl",
            "0.28.0",
            "0.30.0",
            "with a cache and with none, items of one uuid: hashes",
            drawn=IMAGE,
        ),
    ),
}
"""By their numbers in the survey of the tracker."""
