"""Processes requests as SGLang's tokenizer process does: ``python -m tests.night.sglang.process MODEL FOLDER COUNT``.

Prints one line of JSON per request: its ids, and of each item the modality, the runs of its encoder rows, a digest of
each field, and the values by which SGLang's caches know it.
"""

import asyncio
import hashlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

from mmkit.errors import MmkitError
from mmkit.sglang_api import make_item_url

from .cases import MAKERS


def digest(value: Any) -> str:
    """Return what tells a tensor from others."""
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"


def make_processor(folder: str) -> Any:
    """Return the processor of a checkpoint, as SGLang makes it."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.managers.multimodal_processor import get_mm_processor
    from sglang.srt.managers.tokenizer_manager import get_processor_wrapper
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs
    from transformers import AutoConfig

    args = ServerArgs(model_path=folder, device="cpu", attention_backend="torch_native", dtype="float32")
    args.resolve_once()
    publish(args, role="tokenizer")
    return get_mm_processor(AutoConfig.from_pretrained(folder), args, get_processor_wrapper(), None)


async def describe_requests(processor: Any, cases: list[Any]) -> None:
    """Print a line per request."""
    from sglang.srt.managers.schedule_batch import MultimodalInputs

    for case in cases:
        urls = []
        for name, items in case.data.items():
            urls += [make_item_url(name, item) for item in items]
        try:
            output = await processor.process_mm_data_async(
                image_data=None, audio_data=urls, input_text=case.prompt, request_obj=SimpleNamespace(video_data=None)
            )
        except MmkitError as error:
            print(json.dumps({"error": str(error)}))
            continue
        items = []
        for item in MultimodalInputs.from_processor_output(output).mm_items:  # what the scheduler makes of it
            data = item.model_specific_data
            fields = {data["mmkit_feature"]: item.feature, **data["mmkit_fields"]}
            item_description = {
                "modality": data["mmkit_modality"],
                "runs": item.offsets,
                "fields": {name: digest(value) for name, value in fields.items()},
                "values": item.pad_values,
            }
            items.append(item_description)
        description = {"ids": list(output.input_ids), "items": items}
        if output.mrope_positions is not None:
            description["positions"] = [output.mrope_positions.tolist(), int(output.mrope_position_delta)]
        print(json.dumps(description))


if __name__ == "__main__":
    name, folder, count = sys.argv[1:]
    processor = make_processor(folder)
    asyncio.run(describe_requests(processor, MAKERS[name](processor._tokenizer, int(count))))
    processor.shutdown()
