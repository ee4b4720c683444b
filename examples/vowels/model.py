"""The model, a class of transformers: it is trained, and vLLM runs it as it is."""

from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from mmkit.training import MultiModalMixin

from .configuration import VowelsConfig
from .encoder import FrameEncoder
from .recordings import ANSWER_TOKENS, QUESTION
from .spec import VOWELS


class VowelsForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama whose `<frame>` positions take the encoder's rows."""

    mm_spec = VOWELS
    config_class = VowelsConfig

    def __init__(self, config: VowelsConfig) -> None:
        super().__init__(config)
        self.encoder = FrameEncoder(config)
        self.post_init()

    def embed_recording(self, frames: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        """Encode items (frames, channels) to rows (frames, hidden_size)."""
        return [self.encoder(item) for item in frames]

    def answer(self, processor: Any, frames: np.ndarray) -> str:
        """Return the greedy answer to the question who speaks in a recording (frames, channels)."""
        content = [{"type": "recording", "recording": frames}, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": content}]
        inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True)
        ids = self.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        text: str = processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return text
