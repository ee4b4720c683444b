"""Train the model and write its checkpoint: ``python -m examples.vowels.train --help``."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn
from tqdm import tqdm

from mmkit.training import Collator

from .recordings import QUESTION, Recording, augment, load_recordings
from .spec import VOWELS
from .untrained import make_model, make_tokenizer

BATCH = 32
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.1


def draw_samples(processor: Any, recordings: Sequence[Recording], rng: np.random.Generator) -> Iterator[list[Any]]:
    """Yield batches of samples for the collator without end: random recordings, each changed a little.

    Args:
        processor: the processor of `VOWELS`.
        recordings: those to learn from.
        rng: draws recordings and changes.
    """
    content = [{"type": "recording", "recording": recordings[0].frames}, {"type": "text", "text": QUESTION}]
    question = processor.apply_chat_template([{"role": "user", "content": content}])
    prompt = processor.plan.encode(question, add_special_tokens=False)
    while True:
        samples = []
        for index in rng.integers(len(recordings), size=BATCH):
            recording = recordings[index]
            samples.append(
                {
                    "input_ids": prompt,
                    "recording": augment(recording.frames, rng),
                    "answer": f" {recording.answer} {processor.tokenizer.eos_token}",
                }
            )
        yield samples


def train(recordings: Sequence[Recording], steps: int, seed: int) -> tuple[Any, Any]:
    """Train a model from scratch.

    Args:
        recordings: those to learn from.
        steps: batches of 32 recordings.
        seed: of the weights and of what is drawn.

    Returns:
        The model and its processor. Equal arguments give equal weights on one machine.
    """
    tokenizer = make_tokenizer()
    model = make_model(seed, len(tokenizer))
    processor = VOWELS.hf_processor(model.config, tokenizer)
    model.generation_config.suppress_tokens = sorted(processor.plan.embed_ids)  # as vLLM does
    collate = Collator(processor)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps + 1)
    batches = draw_samples(processor, recordings, np.random.default_rng(seed))
    progress = tqdm(range(steps), desc="training", unit="step")
    for _ in progress:
        loss = model(**collate(next(batches))).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.4f}")
    return model.eval(), processor


def main(
    folder: Annotated[Path, typer.Argument(help="Where the checkpoint goes.")],
    steps: Annotated[int, typer.Option(help="Training steps.", min=0)] = 600,
    seed: Annotated[int, typer.Option(help="Seed of the weights, and of what is drawn.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
) -> None:
    """Train a checkpoint on the 270 recordings for training, in less than a minute on one core."""
    torch.set_num_threads(threads)
    model, processor = train(load_recordings("train"), steps, seed)
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters in {folder}")


if __name__ == "__main__":
    typer.run(main)
