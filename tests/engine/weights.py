"""Checkpoints with other weights, loaded by vLLM's own loader in a process that has an engine already."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json")


def copy_checkpoint(checkpoint: Path, folder: Path, weights: Weights, **options: Any) -> Any:
    """Write the checkpoint with other weights to a folder, and return vLLM's configuration for it."""
    from vllm.engine.arg_utils import EngineArgs

    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in FILES:
        if (checkpoint / name).exists():
            (folder / name).write_text((checkpoint / name).read_text())
    return EngineArgs(str(folder), dtype="float32", enforce_eager=True, **options).create_engine_config()


def load_model(checkpoint: Path, folder: Path, weights: Weights, **options: Any) -> Any:
    """Return the model, loaded by vLLM from a folder with these weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = copy_checkpoint(checkpoint, folder, weights, **options)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


def new_model(checkpoint: Path, folder: Path, **options: Any) -> Any:
    """Return the model before its weights are loaded: each is NaN, integers are 0.

    After loading, vLLM packs the weights, and they cannot be compared any more.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    config = copy_checkpoint(checkpoint, folder, {}, **options)
    with set_current_vllm_config(config):
        model = initialize_model(vllm_config=config)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(torch.nan)
        else:
            parameter.data.fill_(0)
    return model
