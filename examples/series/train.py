"""Train the model and write its checkpoint: ``python -m examples.series.train --help``."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup

from .spec import WAVES
from .untrained import make_model, make_tokenizer
from .waves import FIRST_TRAINING_SEED, PROMPT, make_wave

BATCH = 32
"""Texts per step, of two waves each."""
MUON_LR = 0.02
ADAMW_LR = 0.004
WARM_UP_STEPS = 20


def make_batch(processor: Any, pairs: list[list[int]]) -> dict[str, Any]:
    """Return texts about two waves each, of which every token is learned but patches and padding.

    Args:
        processor: the processor of `WAVES`.
        pairs: seeds of two waves per text.
    """
    texts = []
    series = []
    for first_seed, second_seed in pairs:
        first = make_wave(first_seed)
        second = make_wave(second_seed)
        texts.append(f"{PROMPT} {first.answer} . {PROMPT} {second.answer}")
        series.append([first.series, second.series])
    batch = processor(texts, series=series, padding=True)
    is_text = (batch["attention_mask"] == 1) & (batch["mm_token_type_ids"] == 0)
    batch["labels"] = batch["input_ids"].masked_fill(~is_text, -100)
    return batch


def train(steps: int, seed: int) -> tuple[Any, Any]:
    """Train a model from scratch. Returns it and its tokenizer; equal arguments give equal weights on one machine."""
    tokenizer = make_tokenizer()
    model = make_model(seed, len(tokenizer))
    processor = WAVES.hf_processor(model.config, tokenizer)
    model.generation_config.suppress_tokens = sorted(processor.plan.embed_ids)  # as vLLM does
    # Muon for the matrices of the layers, which learns in a fraction of the steps
    matrices = []
    remaining = []
    for name, weight in model.named_parameters():
        if name.startswith("model.layers.") and weight.ndim == 2:
            matrices.append(weight)
        else:
            remaining.append(weight)
    muon = torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(remaining, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0)
    muon_schedule = get_cosine_schedule_with_warmup(muon, WARM_UP_STEPS, steps)
    adamw_schedule = get_cosine_schedule_with_warmup(adamw, WARM_UP_STEPS, steps)
    rng = np.random.default_rng(seed)
    progress = tqdm(range(steps), desc="training", unit="step")
    for _ in progress:
        pairs = rng.integers(FIRST_TRAINING_SEED, 2**62, size=(BATCH, 2)).tolist()
        loss = model(**make_batch(processor, pairs)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
        muon_schedule.step()
        adamw_schedule.step()
        model.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.4f}")
    return model.eval(), tokenizer


def main(
    folder: Annotated[Path, typer.Argument(help="Where the checkpoint goes.")],
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 300,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the waves.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
) -> None:
    """Train a checkpoint, in half a minute on one core."""
    torch.set_num_threads(threads)
    model, tokenizer = train(steps, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters in {folder}")


if __name__ == "__main__":
    typer.run(main)
