"""A tiny Qwen2-VL with random weights, which sees videos: vLLM's class, and the gallery's spec in place of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration

from examples.gallery.qwen2_vl import QWEN2_VL
from tests.oracles import SYSTEMS

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|video_pad|>{% endif %}"
    "{% endfor %}{% endfor %}"
)

QWEN2_VL.register(Qwen2VLForConditionalGeneration)


def make_checkpoint(folder: Path) -> Path:
    """Write a checkpoint. Returns the folder."""
    import torch
    from transformers import AutoConfig
    from transformers import Qwen2VLForConditionalGeneration as HuggingFaceQwen2VL

    shutil.copytree(SYSTEMS["qwen2_vl"].checkpoint, folder)
    torch.manual_seed(0)
    model = HuggingFaceQwen2VL(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # larger than transformers' own start: each frame must count
                parameter.normal_(std=1.5 * parameter[0].numel() ** -0.5)
    config = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
