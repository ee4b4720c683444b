"""Pictures and prompts to try a LLaVA model with."""

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
        form = "text" if isinstance(self.prompt, str) else "token ids"
        count = len(self.images)
        if count == 0:
            return f"no images, {form}"
        if count == 1:
            return f"1 image, {form}"
        return f"{count} images, {form}"

    def request(self, images: Any = None) -> dict[str, Any]:
        """Return the request as vLLM takes it.

        Args:
            images: to send in place of the pictures, such as precomputed embeddings.
        """
        request: dict[str, Any] = {}
        if isinstance(self.prompt, str):
            request["prompt"] = self.prompt
        else:
            request["prompt_token_ids"] = self.prompt
        if images is None:
            images = list(self.images)
        if self.images:
            request["multi_modal_data"] = {"image": images}
        return request


def draw_picture(seed: int) -> Image.Image:
    """Return an RGB picture of 16 to 200 pixels a side, with a few shapes; equal seeds, equal pictures."""
    rng = np.random.default_rng(seed)
    width, height = rng.integers(16, 201, 2).tolist()
    picture = Image.new("RGB", (width, height), _draw_colour(rng))
    draw = ImageDraw.Draw(picture)
    for shape in (draw.ellipse, draw.rectangle, draw.line, draw.ellipse):
        left, right = sorted(rng.integers(0, width, 2).tolist())
        top, bottom = sorted(rng.integers(0, height, 2).tolist())
        shape([left, top, right, bottom], fill=_draw_colour(rng))
    return picture


def _draw_colour(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(rng.integers(0, 256, 3).tolist())


def make_cases(tokenizer: Any, count: int, seed: int = 0) -> list[Case]:
    """Return requests with no to three images, half of them as token ids; pictures and starts of prompts come again.

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
        prompt: str | list[int] = _draw_text(rng, len(images))
        if i // 4 % 2 == 1:
            prompt = tokenizer.encode(prompt)
        cases.append(Case(prompt, images))
    return cases


def _draw_text(rng: np.random.Generator, num_images: int) -> str:
    questions = rng.choice(QUESTIONS, rng.integers(1, 4)).tolist()
    parts = ["<image>"] * num_images + questions
    start = PREAMBLE if rng.random() < 0.7 else "USER: "
    return f"{start}{' '.join(rng.permutation(parts))}\nASSISTANT:"
