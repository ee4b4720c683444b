"""Train the model and write its checkpoint: ``python -m examples.reacher.train --help``."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import nn
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup

from .model import process
from .spec import REACHER
from .untrained import make_model, make_tokenizer
from .world import Scenes, draw_scenes, observe, plan_as_expert, wrap_angles

DEMONSTRATIONS = 20_000
"""Chunks of the expert, each in a scene of its own."""

MISSES = 0.5
"""The share of scenes whose arm has just missed its disc. Without them the model stops beside a disc for good: there it
has seen only arms that have arrived."""

MOST_MISSED = 0.5
"""By how many radians each joint of such an arm may be off."""

TRAINING_STEPS = 1200
"""Batches of a training."""

BATCH = 64
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 100
IGNORED = -100
"""The label of tokens that are not learned, as in transformers."""

TRAINING_SEED = 0
"""Of the scenes to learn from."""


class Demonstrations(NamedTuple):
    """What an expert does.

    Attributes:
        scenes: what is before it.
        actions: float64 (demonstrations, STEPS, DIMENSIONS).
    """

    scenes: Scenes
    actions: np.ndarray


def demonstrate(count: int, seed: int) -> Demonstrations:
    """Return chunks of an expert, who begins anywhere, or beside the disc that it is to touch."""
    rng = np.random.default_rng(seed)
    scenes = draw_scenes(rng, count)
    arrived = scenes.move(plan_as_expert(scenes)).joints
    missed = wrap_angles(arrived + rng.uniform(-MOST_MISSED, MOST_MISSED, arrived.shape))
    has_missed = rng.random((count, 1)) < MISSES
    scenes = scenes._replace(joints=np.where(has_missed, missed, scenes.joints))
    return Demonstrations(scenes, plan_as_expert(scenes))


def prepare(processor: Any, demonstrations: Demonstrations) -> dict[str, torch.Tensor]:
    """Return the inputs of the model, a row for each demonstration: its prompt, and its chunk as the answer to learn.

    The processor is that of the server: what is trained on is what is served.
    """
    batch = process(processor, observe(demonstrations.scenes))
    output = processor.plan.outputs["chunk"]
    return stack_answers(batch, torch.tensor([output.encode(actions) for actions in demonstrations.actions]))


def stack_answers(batch: Any, answers: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inputs of prompts with their answers behind them, and the answers as labels.

    Args:
        batch: of a processor; all prompts have one length.
        answers: int64 (prompts, tokens).
    """
    rows: dict[str, torch.Tensor] = dict(batch)
    del rows["placeholders"]  # no tensor, and needed only where the rows of items differ in number
    prompts = rows["input_ids"]
    rows["input_ids"] = torch.cat([prompts, answers], 1)
    rows["labels"] = torch.cat([torch.full_like(prompts, IGNORED), answers], 1)
    rows["mm_token_type_ids"] = torch.cat([rows["mm_token_type_ids"], torch.zeros_like(answers)], 1)
    rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    return rows


def fit(model: Any, rows: dict[str, torch.Tensor], steps: int) -> None:
    """Train a model to predict each token of the answers, on random rows; torch's seed decides which."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARM_UP_STEPS, steps)
    num_rows = len(rows["input_ids"])
    progress = tqdm(range(steps), desc="training", unit="step")
    for _ in progress:
        chosen = torch.randint(num_rows, (BATCH,))
        loss = model(**{name: values[chosen] for name, values in rows.items()}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.4f}")
    model.eval()


def train(steps: int, seed: int) -> tuple[Any, Any]:
    """Train a model from scratch on the chunks of an expert.

    Args:
        steps: batches of 64 chunks.
        seed: of the weights, and of the order of the demonstrations.

    Returns:
        The model and its processor. Equal arguments give equal weights on one machine.
    """
    tokenizer = make_tokenizer()
    model = make_model(seed, len(tokenizer))
    processor = REACHER.hf_processor(model.config, tokenizer)
    fit(model, prepare(processor, demonstrate(DEMONSTRATIONS, TRAINING_SEED)), steps)
    return model, processor


def main(
    folder: Annotated[Path, typer.Argument(help="Where the checkpoint goes.")],
    steps: Annotated[int, typer.Option(help="Training steps.", min=0)] = TRAINING_STEPS,
    seed: Annotated[int, typer.Option(help="Seed of the weights, and of the order of samples.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 2,
) -> None:
    """Train a checkpoint on what an expert does, in two minutes on two cores."""
    torch.set_num_threads(threads)
    model, processor = train(steps, seed)
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters in {folder}")


if __name__ == "__main__":
    typer.run(main)
