"""What `mmkit.model.sound` adds to a request's time in the engine:
``python -m benchmarks.containment --help``.

The tiny LLaVA-like model on a CPU, in one process with one thread: the smaller the model, the
larger the share. Requests of one new image each are answered in turns, with the check of encoder
rows and with `contained` replaced by nothing. Times are those of the process, which other work on
the machine does not lengthen.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer

from . import measure


def main(
    rounds: Annotated[int, typer.Option(min=10, help="Requests of each kind, in turns.")] = 500,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 8,
) -> None:
    """The ratio of a request's time with the check to its time without."""
    measure.quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import numpy as np
    import torch
    from PIL import Image
    from vllm import LLM, SamplingParams

    from examples.llava_like import ARCHITECTURE, checkpoint, register
    from mmkit import model

    register()
    nothing = torch.zeros((), dtype=torch.int64)

    def unchecked(
        rows: Sequence[torch.Tensor], _: float
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        return list(rows), nothing

    seconds: dict[str, list[float]] = defaultdict(list)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        overrides = {"architectures": [ARCHITECTURE]}
        folder_name = str(checkpoint.make_checkpoint(Path(folder)))
        llm = LLM(folder_name, dtype="float32", enforce_eager=True, hf_overrides=overrides)

        def ask() -> float:
            image = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
            request: Any = {"prompt": "<image> what is it?", "multi_modal_data": {"image": image}}
            began = time.process_time()
            llm.generate(request, sampling, use_tqdm=False)
            return time.process_time() - began

        for _ in range(10):
            ask()
        for turn in measure.progress(range(2 * rounds), "requests"):
            if (turn + turn // 2) % 2:  # ABBA, so that what drifts hits both
                seconds["checked"].append(ask())
                continue
            with mock.patch.object(model, "contained", unchecked):
                seconds["unchecked"].append(ask())
        llm.llm_engine.engine_core.shutdown()
    figure = measure.ratio(seconds, "checked", "unchecked")
    figure["ratio_of_medians"] = figure["checked_ms"] / figure["unchecked_ms"]
    measure.store("containment", {"rounds": rounds, "tokens": tokens, **figure})
    measure.table(["checked, ms", "unchecked, ms", "of pairs", "of medians"], [
        [f"{figure['checked_ms']:.3f}", f"{figure['unchecked_ms']:.3f}", measure.shown(figure),
         f"{figure['ratio_of_medians']:.4f}"]
    ])  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
