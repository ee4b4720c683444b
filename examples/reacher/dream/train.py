"""Train the world model and write its checkpoint: ``python -m examples.reacher.dream.train --help``."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from ..train import DEMONSTRATIONS, Demonstrations, demonstrate, fit, stack_answers
from ..untrained import make_word_tokenizer
from ..world import MAX_DELTA, observe
from .configuration import DreamConfig
from .model import DreamForCausalLM, process
from .places import NUM_PLACES, NUM_SIDES, encode_places
from .spec import DREAM, to_ids

TRAINING_SEED = 1
"""Of the scenes to learn from, which are others than the robot's."""

MOST_NOISE = 0.6
"""The most that a chunk of the expert is mixed with a random drift: the world answers to any action."""


def make_untrained(seed: int) -> tuple[Any, Any]:
    """Return a freshly initialised model of 0.4 million parameters, and its processor."""
    tokenizer = make_word_tokenizer(["<frame>", "<state>", "<chunk>"])
    config = DreamConfig(
        first_place_id=len(tokenizer),
        vocab_size=len(tokenizer) + NUM_PLACES + NUM_SIDES,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.06,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = DreamForCausalLM(config)
    model.generation_config.suppress_tokens = list(range(len(tokenizer)))
    return model, DREAM.hf_processor(config, tokenizer)


def wander(demonstrations: Demonstrations, seed: int) -> np.ndarray:
    """Return the chunks of the expert, each mixed with a random drift, float64 (demonstrations, STEPS, 2)."""
    rng = np.random.default_rng(seed)
    actions = demonstrations.actions
    drifts = rng.uniform(-MAX_DELTA, MAX_DELTA, (len(actions), 1, 2))
    shares = rng.uniform(0, MOST_NOISE, (len(actions), 1, 1))
    return actions + shares * (drifts - actions)


def prepare(processor: Any, demonstrations: Demonstrations, seed: int) -> dict[str, torch.Tensor]:
    """Return the inputs of the model, a row for each picture, with the frame after a chunk as the answer."""
    actions = wander(demonstrations, seed)
    after = demonstrations.scenes.move(actions)
    batch = process(processor, observe(demonstrations.scenes), actions)
    ids = to_ids(encode_places(after), processor.plan.environment.scope)
    return stack_answers(batch, torch.tensor(ids))


def main(
    folder: Annotated[Path, typer.Argument(help="Where the checkpoint goes.")],
    steps: Annotated[int, typer.Option(help="Training steps.", min=0)] = 1500,
    seed: Annotated[int, typer.Option(help="Seed of the weights, and of the order of samples.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
) -> None:
    """Train a world model on what the world does, in three minutes on one core."""
    torch.set_num_threads(threads)
    model, processor = make_untrained(seed)
    fit(model, prepare(processor, demonstrate(DEMONSTRATIONS, TRAINING_SEED), seed), steps)
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters in {folder}")


if __name__ == "__main__":
    typer.run(main)
