"""A LLaVA checkpoint in transformers, to compare with."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration


class Reference:
    """The checkpoint, run by transformers' own class."""

    def __init__(self, model: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(model)
        self.model = LlavaForConditionalGeneration.from_pretrained(model).eval()

    @torch.inference_mode()
    def embed(self, images: Sequence[Image.Image]) -> list[torch.Tensor]:
        """One (rows, hidden_size) float32 tensor per image: what a caller may send in place of it."""
        pixels = self.processor.image_processor(images=list(images), return_tensors="pt")["pixel_values"]
        return list(self.model.get_image_features(pixel_values=pixels).pooler_output)

    @torch.inference_mode()
    def answer(self, text: str, images: Sequence[Image.Image], max_tokens: int = 16) -> list[int]:
        """Return the greedy answer to one prompt, as token ids."""
        inputs = self.processor(text=text, images=list(images) or None, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        generated = self.model.generate(**inputs, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False)
        return generated[0, length:].tolist()
