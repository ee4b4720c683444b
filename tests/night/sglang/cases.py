"""The same requests for both engines, as mmkit writes them: a prompt, and items by modality."""

from typing import Any, NamedTuple

import numpy as np
import torch

from examples.llava_like.cases import draw_picture
from examples.llava_like.cases import make_cases as make_pictures
from examples.series.waves import make_wave

from .notes import SEPARATOR

WORDS = ["sine", "wave", "of", "period", "is", "a"]


class Case(NamedTuple):
    """One request.

    Attributes:
        prompt: a text, or token ids.
        data: as a caller writes it into ``multi_modal_data``.
    """

    prompt: str | list[int]
    data: dict[str, list[Any]]


def make_series(tokenizer: Any, count: int) -> list[Case]:
    """Return requests with no to three series; of the first 50, three are refused."""
    rng = np.random.default_rng(0)
    cases = []
    for number in range(count):
        series = []
        for _ in range(number % 4):
            wave = make_wave(int(rng.integers(0, 12))).series
            series.append(wave[: int(rng.integers(1, 65))])
        text = " ".join(rng.permutation(["<series>"] * len(series) + ["is", "a"]))
        prompt: str | list[int] = text
        if number % 8 >= 4:
            prompt = tokenizer.encode(text)
        if number == 30:
            series[0] = series[0][:0]
        elif number == 31:
            series[0] = np.zeros((65, 1), np.float32)
        elif number == 34:
            series[0] = series[0] * np.nan
        cases.append(Case(prompt, {"series": series} if series else {}))
    return cases


def make_llava_like(tokenizer: Any, count: int) -> list[Case]:
    """Return requests with no to three pictures."""
    cases = []
    for case in make_pictures(tokenizer, count):
        cases.append(Case(case.prompt, {"image": list(case.images)} if case.images else {}))
    return cases


def make_notes(tokenizer: Any, count: int) -> list[Case]:
    """Return requests with one or two records; of each eight, one misses its target."""
    rng = np.random.default_rng(1)
    cases = []
    for number in range(count):
        records = []
        for _ in range(1 + number % 2):
            num_series = int(rng.integers(1, 5))
            texts = []
            for _ in range(num_series):
                texts.append(" ".join(rng.choice(WORDS, int(rng.integers(1, 4)))))
            values = rng.normal(size=(num_series, int(rng.integers(1, 33)))).astype(np.float32)
            records.append({"values": torch.from_numpy(values), "texts": SEPARATOR.join(texts)})
        text = " ".join(["<series>"] * len(records) + ["is", "a"])
        if number % 8 == 7:
            text = "is a"
        cases.append(Case(text, {"notes": records}))
    return cases


def make_qwen2_vl(tokenizer: Any, count: int) -> list[Case]:
    """Return requests with no to three pictures, whose positions have three dimensions."""
    start, picture, end = (tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in QWEN_TOKENS)
    words = tokenizer.encode("hello world")
    cases = []
    for number in range(count):
        prompt = list(words)
        pictures = []
        for seed in range(number % 4):
            prompt += [start, picture, end, *words]
            pictures.append(draw_picture(number + seed))
        cases.append(Case(prompt, {"image": pictures} if pictures else {}))
    return cases


QWEN_TOKENS = ("vision_start", "image_pad", "vision_end")

MAKERS = {
    "series": make_series,
    "llava_like": make_llava_like,
    "notes": make_notes,
    "qwen2_vl": make_qwen2_vl,
}
"""The requests of each model, by its name: a function of the tokenizer and their number."""
