"""One of vLLM's own models in the engine, with its hand-written processor and then with the spec of the gallery.

tests/engine/test_gallery.py runs it with a folder; it prints the ids of both as one line of JSON.
"""

import gc
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Blip2Config, Blip2ForConditionalGeneration
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models import blip2

from examples.gallery.blip2 import BLIP2
from tests.oracles import SYSTEMS, items_of

IMAGES = [{"seed": seed, "width": 30 + 7 * seed, "height": 90 - 9 * seed} for seed in range(6)]
QUESTIONS = ["Question: what is in the image? Answer:", "hello world", ""]


def make_checkpoint(folder: Path) -> None:
    """The stored checkpoint, with random weights that are large enough to tell images apart."""
    shutil.copytree(SYSTEMS["blip2"].checkpoint, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(Blip2Config.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # norms and biases stay as they are
                parameter.normal_(std=2 * parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)


def generate(folder: Path) -> tuple[str, list[list[int]]]:
    """The name of the processor, and the greedy ids of all requests."""
    llm = LLM(str(folder), dtype="float32", max_model_len=256, seed=0, enforce_eager=True, max_num_seqs=4)
    images = items_of({"items": {"image": IMAGES}})["image"]
    requests: list[Any] = [{"prompt": q, "multi_modal_data": {"image": image}} for q in QUESTIONS for image in images]
    requests += [{"prompt": q} for q in QUESTIONS[:2]]
    answers = llm.generate(requests, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    name = type(llm.llm_engine.renderer.mm_processor).__name__
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return name, [list(answer.outputs[0].token_ids) for answer in answers]


def main(folder: Path) -> None:
    make_checkpoint(folder)
    before = generate(folder)
    BLIP2.register(blip2.Blip2ForConditionalGeneration)
    print("IDS", json.dumps([before, generate(folder)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
