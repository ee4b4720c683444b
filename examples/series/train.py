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
MUON_LR, ADAMW_LR, WARM_UP_STEPS = 0.02, 0.004, 20


def make_batch(processor: Any, pairs: list[list[int]]) -> dict[str, Any]:
    """Texts about two waves each, of which every token is learned but patches and padding."""
    waves = [[make_wave(seed) for seed in pair] for pair in pairs]
    texts = [" . ".join(f"{PROMPT} {wave.answer}" for wave in pair) for pair in waves]
    batch = processor(texts, series=[[wave.series for wave in pair] for pair in waves], padding=True)
    is_text = (batch["attention_mask"] == 1) & (batch["mm_token_type_ids"] == 0)
    return {**batch, "labels": batch["input_ids"].masked_fill(~is_text, -100)}


def train(steps: int, seed: int) -> tuple[Any, Any]:
    """Train a model from scratch. Returns it and its tokenizer; equal arguments give equal weights on one machine."""
    tokenizer = make_tokenizer()
    model = make_model(seed, len(tokenizer))
    processor = WAVES.hf_processor(model.config, tokenizer)
    model.generation_config.suppress_tokens = sorted(processor.plan.embed_ids)  # as vLLM does
    # Muon for the matrices of the layers, which learns in a fraction of the steps
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    rest = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [get_cosine_schedule_with_warmup(one, WARM_UP_STEPS, steps) for one in optimizers]
    rng = np.random.default_rng(seed)
    progress = tqdm(range(steps), desc="training", unit="step")
    for _ in progress:
        pairs = rng.integers(FIRST_TRAINING_SEED, 2**62, size=(BATCH, 2)).tolist()
        loss = model(**make_batch(processor, pairs)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in (*optimizers, *schedules):
            one.step()
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
