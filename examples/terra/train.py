"""Train the example checkpoint of Terra on the road world, or evaluate one.

    python -m examples.terra.train --out DIR
    python -m examples.terra.train --evaluate DIR

The defaults reproduce the committed checkpoint: 2,000 steps, about 18 minutes on one core.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor, nn
from tqdm import tqdm

from . import world
from .configuration import LlamaActionConfig
from .reference import LlamaActionForCausalLM
from .world import CONTEXT_FRAMES
from .worlds import TILES

POSITIONS_PER_STEP = 4480
"""Positions of a batch, at most, whatever the length of its windows: 16 windows of 4 frames."""
WINDOW_FRAMES, WINDOW_SHARES = (4, 8, world.NUM_FRAMES), (0.5, 0.2, 0.3)
"""Window lengths and how often each is drawn, once the first part of the training with the shortest is over."""
SHORT_PART = 0.35
MUON_LR, ADAMW_LR = 0.01, 0.003
WARM_UP_STEPS = 100
CHECK_EVERY = 100


def make_config() -> LlamaActionConfig:
    """Return the sizes of the example model: the published layout, made small."""
    positions = world.TOKENS_PER_FRAME + world.NUM_WAYPOINTS
    placeholder = world.NUM_TILES
    return LlamaActionConfig(
        vocab_size=world.NUM_TILES + 1,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions * world.NUM_FRAMES,
        initializer_range=0.06,
        pad_token_id=placeholder,
        bos_token_id=placeholder,
        eos_token_id=placeholder,
        num_spatio_embeddings=positions,
        num_temporal_embeddings=world.NUM_FRAMES,
        num_action_tokens=world.NUM_WAYPOINTS,
        num_image_patches=world.TOKENS_PER_FRAME,
        action_dim=3,
        image_tokenizer=TILES,
    )


def make_model(seed: int) -> LlamaActionForCausalLM:
    """Return a freshly initialised model."""
    torch.manual_seed(seed)
    model = LlamaActionForCausalLM(make_config())
    for weight in (model.model.embed_tokens.weight[:-1], model.action_projection.weight):
        nn.init.normal_(weight.data, std=0.1)
    # Row vector + column vector, so that what is learned in one cell serves in the others.
    table = model.pos_embedding_spatio_temporal.spatio_embeddings.weight.data
    rows = torch.randn(world.GRID, 1, table.shape[1])
    cols = torch.randn(1, world.GRID, table.shape[1])
    table[: world.TOKENS_PER_FRAME] = 0.1 * (rows + cols).flatten(0, 1)
    return model


def make_optimizers(model: LlamaActionForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, which learns in a fraction of the steps, and AdamW for the rest."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = set(matrices)
    rest = [weight for weight in model.parameters() if weight not in chosen]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def sample_batch(rng: np.random.Generator, num_frames: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample windows of new training episodes, each placed at a random moment so that every moment is trained.

    Returns:
        Frames int64 (batch, num_frames, TOKENS_PER_FRAME), actions float32 (batch, num_frames - 1, NUM_WAYPOINTS, 3)
        and the moment of each first frame, int64 (batch, 1).
    """
    size = POSITIONS_PER_STEP // ((world.TOKENS_PER_FRAME + world.NUM_WAYPOINTS) * num_frames)
    seeds = rng.integers(world.FIRST_TRAINING_SEED, 2**62, size=size).tolist()
    moments = rng.integers(0, world.NUM_FRAMES - num_frames + 1, size=(size, 1))
    return *make_batch(seeds, num_frames), torch.from_numpy(moments)


def make_batch(seeds: list[int], num_frames: int) -> tuple[Tensor, Tensor]:
    """Stack episodes: frames int64 (batch, num_frames, ...) and actions float32 (batch, num_frames - 1, ...)."""
    episodes = [world.make_episode(seed, num_frames=num_frames) for seed in seeds]
    frames = np.stack([episode.frames for episode in episodes])
    actions = np.stack([episode.actions for episode in episodes])
    return torch.from_numpy(frames), torch.from_numpy(actions)


def predict(model: LlamaActionForCausalLM, frames: Tensor, actions: Tensor, moments: Tensor) -> Tensor:
    """Predict every frame but the first from the true frames before it.

    Args:
        model: the model.
        frames: int64 (batch, num_frames, num_image_patches).
        actions: float32 (batch, num_frames - 1, num_action_tokens, action_dim).
        moments: that of each first frame, int64 (batch, 1).

    Returns:
        Logits, float32 (batch, num_frames - 1, num_image_patches, vocab).
    """
    config = model.config
    input_ids = model.interleave(frames)[:, : -config.num_action_tokens]
    position_ids = moments * config.num_spatio_embeddings + torch.arange(input_ids.shape[1])
    firsts = torch.arange(1, frames.shape[1])[:, None] * config.num_spatio_embeddings
    predictors = (firsts + torch.arange(config.num_image_patches) - 1).flatten()
    outputs = model(
        input_ids, actions.flatten(0, 1), position_ids=position_ids, use_cache=False, logits_to_keep=predictors
    )
    logits: Tensor = outputs.logits
    return logits.view(len(frames), -1, config.num_image_patches, config.vocab_size)


@torch.no_grad()
def check(model: LlamaActionForCausalLM) -> float:
    """Return the share of right tokens on held-out windows, each frame predicted from true ones."""
    last = world.HELD_OUT_EPISODES  # far from the episodes that are evaluated, which count from 0
    frames, actions = make_batch(list(range(last - 16, last)), WINDOW_FRAMES[0])
    moments = torch.arange(16)[:, None]
    return (predict(model, frames, actions, moments).argmax(-1) == frames[:, 1:]).float().mean().item()


def train(steps: int, seed: int) -> LlamaActionForCausalLM:
    """Train a model from scratch; equal arguments and threads give equal weights on the same machine."""
    model = make_model(seed)
    optimizers = make_optimizers(model)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(1.0, (step + 1) / WARM_UP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * step / steps)),
        )
        for optimizer in optimizers
    ]
    rng = np.random.default_rng(seed)
    accuracy = check(model)
    progress = tqdm(range(steps), desc="training", unit="step")
    for step in progress:
        short = step < SHORT_PART * steps
        num_frames = WINDOW_FRAMES[0] if short else int(rng.choice(WINDOW_FRAMES, p=WINDOW_SHARES))
        frames, actions, moments = sample_batch(rng, num_frames)
        logits = predict(model, frames, actions, moments)
        loss = nn.functional.cross_entropy(logits.flatten(0, 2), frames[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if (step + 1) % CHECK_EVERY == 0:
            accuracy = check(model)
        progress.set_postfix(loss=f"{loss.item():.5f}", held_out=f"{accuracy:.2%}")
    return model


def roll_out(model: LlamaActionForCausalLM, frames: Tensor, actions: Tensor, description: str) -> Tensor:
    """Generate all frames after the first CONTEXT_FRAMES, with a progress bar.

    Args:
        model: the model.
        frames: int64 (batch, NUM_FRAMES, TOKENS_PER_FRAME); only the context is read.
        actions: float32 (batch, NUM_FRAMES - 1, NUM_WAYPOINTS, 3).
        description: label of the progress bar.

    Returns:
        int64 (batch, NUM_FRAMES - CONTEXT_FRAMES, TOKENS_PER_FRAME).
    """
    count = frames.shape[1] - CONTEXT_FRAMES
    generated: Iterator[Tensor] = model.rollout(frames[:, :CONTEXT_FRAMES], actions, count)
    return torch.stack(list(tqdm(generated, total=count, desc=description, unit="frame")), dim=1)


def evaluate(model: LlamaActionForCausalLM, num_episodes: int) -> dict[str, float]:
    """Return the share of right tokens over the generated frames of held-out episodes, by kind of rollout."""
    frames, actions = make_batch(list(range(num_episodes)), world.NUM_FRAMES)
    truth = frames[:, CONTEXT_FRAMES:]
    rng = np.random.default_rng(0)
    # Actions that lead from one context frame to the next stay in place.
    shuffled = actions.numpy().copy()
    for episode in shuffled:
        rng.shuffle(episode[CONTEXT_FRAMES - 1 :])
    predictions = {
        "true actions": roll_out(model, frames, actions, "true actions"),
        "shuffled actions": roll_out(model, frames, torch.from_numpy(shuffled), "shuffled actions"),
        "repeated last context frame": frames[:, CONTEXT_FRAMES - 1 : CONTEXT_FRAMES],
    }
    return {kind: (predicted == truth).float().mean().item() for kind, predicted in predictions.items()}


def main(
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the episodes.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Where to save the checkpoint.")] = Path("out/checkpoint"),
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    evaluate_dir: Annotated[
        Path | None, typer.Option("--evaluate", help="Evaluate this checkpoint instead of training one.")
    ] = None,
    episodes: Annotated[int, typer.Option(help="Held-out episodes to evaluate.", min=1)] = 24,
) -> None:
    """Train a checkpoint and evaluate it, or evaluate one."""
    torch.set_num_threads(threads)
    if evaluate_dir is None:
        model = train(steps, seed)
        model.save_pretrained(out)
    else:
        model = LlamaActionForCausalLM.from_pretrained(evaluate_dir, dtype=torch.float32)
    generated = world.NUM_FRAMES - CONTEXT_FRAMES
    for kind, accuracy in evaluate(model, episodes).items():
        print(f"{accuracy:.2%} of the tokens of {generated} frames right over {episodes} held-out episodes: {kind}")


if __name__ == "__main__":
    typer.run(main)
