"""The time-series model as one class, with a `forward` that changes states and logits."""

import json
import shutil
from pathlib import Path
from typing import Any

from examples.series import CHECKPOINT
from examples.series.configuration import WavesConfig
from examples.series.reference import WavesForCausalLM
from mmkit import serve_transformers


class OneClassWavesForCausalLM(WavesForCausalLM):
    """It has the weights of its base."""

    def forward(self, input_ids: Any = None, **inputs: Any) -> Any:
        """Run the base with larger embeddings, and bring its logits to a smaller range."""
        inputs = self._embed_batch(input_ids, inputs)
        ids = inputs.pop("input_ids", None)
        embeds = inputs.pop("inputs_embeds", None)
        if embeds is None:
            embeds = self.get_input_embeddings()(ids)
        outputs = super().forward(inputs_embeds=embeds * 1.25, **inputs)
        logits = outputs[0] / 4
        if inputs.get("return_dict") is False:
            return (logits, *outputs[1:])
        outputs.logits = logits
        return outputs


def register() -> None:
    """Tell transformers and vLLM about the model."""
    serve_transformers(f"{__name__}:OneClassWavesForCausalLM", WavesConfig)


def copy_checkpoint(folder: Path, architecture: str = "OneClassWavesForCausalLM") -> Path:
    """Copy the checkpoint of the series for a class, and return its folder."""
    shutil.copytree(CHECKPOINT, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config))
    return folder
