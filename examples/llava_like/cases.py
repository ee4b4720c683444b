"""Pictures and prompts to try a LLaVA model with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

QUESTIONS = (
    "What is this?",
    "Which of the shapes is the largest, and what colour does it have?",
    "Describe the scene in one sentence.",
    "How many circles do you see?",
    "Is there anything red here?",
)
PREAMBLE = "USER: Look at everything you are given, then answer briefly.\n"
"""Most prompts start with it: longer than a block of the KV cache, so that the prefix cache acts."""
PICTURES = 10


@dataclass(frozen=True)
class Case:
    """One request: a prompt, as text or token ids, with `<image>` wherever one of the images belongs."""

    prompt: str | list[int]
    images: tuple[Image.Image, ...]

    @property
    def kind(self) -> str:
        """How the request is made, in a few words."""
        count = len(self.images)
        how = "text" if isinstance(self.prompt, str) else "token ids"
        return f"{count or 'no'} image{'s' * (count != 1)}, {how}"

    def request(self, images: Any = None) -> dict[str, Any]:
        """What vLLM takes. `images`: to send in place of the pictures, such as precomputed embeddings."""
        key = "prompt" if isinstance(self.prompt, str) else "prompt_token_ids"
        prompt: dict[str, Any] = {key: self.prompt}
        if self.images:
            prompt["multi_modal_data"] = {"image": list(self.images) if images is None else images}
        return prompt


def draw_picture(seed: int) -> Image.Image:
    """An RGB picture of 16 to 200 pixels a side, with a few shapes; equal seeds, equal pictures."""
    rng = np.random.default_rng(seed)
    width, height = rng.integers(16, 201, 2).tolist()
    picture = Image.new("RGB", (width, height), _colour(rng))
    draw = ImageDraw.Draw(picture)
    for shape in (draw.ellipse, draw.rectangle, draw.line, draw.ellipse):
        xs, ys = sorted(rng.integers(0, width, 2).tolist()), sorted(rng.integers(0, height, 2).tolist())
        shape([xs[0], ys[0], xs[1], ys[1]], fill=_colour(rng))
    return picture


def _colour(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(rng.integers(0, 256, 3).tolist())


def make_cases(tokenizer: Any, count: int, seed: int = 0) -> list[Case]:
    """Requests with no to three images, half of them as token ids; pictures and the starts of prompts come again.

    Args:
        tokenizer: of the checkpoint.
        count: how many.
        seed: equal seeds, equal requests.
    """
    rng = np.random.default_rng(seed)
    pictures = [draw_picture(i) for i in range(PICTURES)]
    cases = []
    for i in range(count):
        images = tuple(pictures[k] for k in rng.integers(0, PICTURES, i % 4))
        text = _text(rng, len(images))
        cases.append(Case(text if i // 4 % 2 == 0 else tokenizer.encode(text), images))
    return cases


def _text(rng: np.random.Generator, images: int) -> str:
    parts: Sequence[str] = [*["<image>"] * images, *rng.choice(QUESTIONS, rng.integers(1, 4))]
    start = PREAMBLE if rng.random() < 0.7 else "USER: "
    return f"{start}{' '.join(rng.permutation(parts))}\nASSISTANT:"
