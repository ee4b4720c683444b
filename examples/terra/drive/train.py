"""Train a world model on recorded drives: `python -m examples.terra.drive.train --help`.

The model is the published Terra, made small. `python -m examples.terra.drive.judge` measures what came of it.
"""

import math
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn
from tqdm import tqdm

from ..configuration import LlamaActionConfig
from ..reference import LlamaActionForCausalLM
from ..train import predict
from ..worlds import DRIVE
from . import CHECKPOINT
from .data import Tokens, read, training_files
from .drives import DATA, FIRST_TRAINING_SEED, NUM_FRAMES, NUM_WAYPOINTS, VIEW_METRES
from .muon import Muon
from .tokenizer import Tokenizer

POSITIONS_PER_STEP = 4240
"""Positions of a batch, whatever the length of its windows: 10 windows of 4 frames."""
WINDOW_FRAMES, WINDOW_SHARES = (4, 8, NUM_FRAMES), (0.6, 0.25, 0.15)
"""Window lengths and how often each is drawn, once the first part of the training with the shortest is over."""
SHORT_PART = 0.5
MUON_LR, ADAMW_LR = 0.02, 0.003
WARM_UP_STEPS = 100
CHANGED_WEIGHT, EGO_WEIGHT = 5.0, 20.0
"""How much more a token counts that differs from the last frame's, and one by the ego vehicle's next place: most of a
frame stands still, and where the ego vehicle goes is what a model of actions is for."""
EGO_METRES = 5.7
"""A patch whose middle is at most so far from the ego vehicle's shows some of it: half of both their lengths."""
MOST_DAMAGE = 0.5
"""Largest share of a window's tokens that is replaced before the model reads them: a rollout reads its own mistakes."""
NUM_WAVES = 9
"""Numbers from which the place of a token along one axis is embedded at first."""
CHECK_EVERY, SAVE_EVERY = 100, 500
VALIDATION_DRIVES = 100
"""The last of the training drives, which are measured on and not trained on."""


def make_config(tokenizer: Tokenizer) -> LlamaActionConfig:
    """Return the sizes of the model: the published layout, made small."""
    tokens = tokenizer.config.rows * tokenizer.config.cols
    placeholder = tokenizer.config.vocab_size
    return LlamaActionConfig(
        vocab_size=placeholder + 1,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=(tokens + NUM_WAYPOINTS) * NUM_FRAMES,
        initializer_range=0.06,
        pad_token_id=placeholder,
        bos_token_id=placeholder,
        eos_token_id=placeholder,
        num_spatio_embeddings=tokens + NUM_WAYPOINTS,
        num_temporal_embeddings=NUM_FRAMES,
        num_action_tokens=NUM_WAYPOINTS,
        num_image_patches=tokens,
        action_dim=3,
        image_tokenizer=DRIVE,
    )


def make_model(tokenizer: Tokenizer) -> LlamaActionForCausalLM:
    """Return a freshly initialised model."""
    model = LlamaActionForCausalLM(make_config(tokenizer))
    nn.init.normal_(model.model.embed_tokens.weight.data[:-1], std=0.1)
    # metres, at most half of the view, to rows about as long as the bias: a norm keeps how far the vehicle is
    nn.init.normal_(model.action_projection.weight.data, std=2 / VIEW_METRES)
    nn.init.normal_(model.action_projection.bias.data, std=1.0)
    # smooth in row and column, so that what is learned in one place serves in the others
    table = model.pos_embedding_spatio_temporal.spatio_embeddings.weight.data
    rows, cols = (
        _waves(count) @ torch.randn(NUM_WAVES, table.shape[1])
        for count in (tokenizer.config.rows, tokenizer.config.cols)
    )
    table[: model.config.num_image_patches] = 0.1 * (rows[:, None] + cols).flatten(0, 1)
    return model


def _waves(count: int) -> Tensor:
    """Places along one axis as smooth numbers: float (count, NUM_WAVES), the place and waves of several lengths."""
    places = torch.linspace(-1, 1, count)[:, None]
    angles = math.pi / 2 * places * torch.arange(1, NUM_WAVES // 2 + 1)
    return torch.cat([places, angles.sin(), angles.cos()], dim=1)


def make_optimizers(model: LlamaActionForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = {*matrices, model.action_projection.weight}
    rest = [weight for weight in model.parameters() if weight not in chosen]
    # metres are large numbers: a step as long as the others' would throw the vehicle about
    groups: list[dict[str, Any]] = [
        {"params": rest},
        {"params": [model.action_projection.weight], "lr": ADAMW_LR / (VIEW_METRES / 2)},
    ]
    adamw = torch.optim.AdamW(groups, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = [Muon(matrices, lr=MUON_LR), adamw]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["highest_lr"] = group["lr"]
    return optimizers


def by_ego(actions: Tensor, rows: int, cols: int) -> Tensor:
    """Which tokens of the next frame may show the ego vehicle.

    Args:
        actions: float32 (..., waypoints, 3).
        rows, cols: tokens of a frame along either axis.

    Returns:
        bool (..., rows * cols).
    """
    middles = (torch.cartesian_prod(torch.arange(rows), torch.arange(cols)) + 0.5) / torch.tensor([rows, cols])
    places = actions[..., -1, :2].flip(-1)  # rows are y
    distances: Tensor = (VIEW_METRES * (middles - 0.5) - places[..., None, :]).norm(dim=-1)
    return distances <= EGO_METRES


def damaged(frames: Tensor, rng: np.random.Generator) -> Tensor:
    """Replace tokens of windows, in some windows more than in others, by those of other windows in the same place."""
    shares = torch.from_numpy(MOST_DAMAGE * rng.random((len(frames), 1, 1)) ** 3)
    others = frames[torch.from_numpy(rng.permutation(len(frames)))]
    return torch.where(torch.from_numpy(rng.random(frames.shape)) < shares, others, frames)


def loss_of(logits: Tensor, frames: Tensor, is_ego: Tensor) -> Tensor:
    """Cross entropy, in which tokens count more that differ from the last frame's or are by the ego vehicle."""
    truth = frames[:, 1:]
    losses = nn.functional.cross_entropy(logits.flatten(0, 2), truth.flatten(), reduction="none")
    weights = 1 + (CHANGED_WEIGHT - 1) * (truth != frames[:, :-1]) + (EGO_WEIGHT - 1) * is_ego
    return (losses * weights.flatten()).sum() / weights.sum()


@torch.no_grad()
def check(model: LlamaActionForCausalLM, tokens: Tokens, grid: tuple[int, int]) -> dict[str, float]:
    """The share of right tokens on windows that are not trained on: of all, of those that changed, of the ego's."""
    frames, actions, moments = tokens.windows(np.random.default_rng(0), 24, WINDOW_FRAMES[0])
    is_right = (predict(model, frames, actions, moments).argmax(-1) == frames[:, 1:]).float()
    is_changed = frames[:, 1:] != frames[:, :-1]
    groups = {"right": torch.ones_like(is_changed), "changed": is_changed, "ego": is_changed & by_ego(actions, *grid)}
    return {name: is_right[group].mean().item() for name, group in groups.items()}


def train(
    tokens: Tokens, model: LlamaActionForCausalLM, grid: tuple[int, int], steps: int, seed: int, out: Path
) -> None:
    """Train a model, from where the last run broke off if there was one; saves it into a folder."""
    optimizers = make_optimizers(model)
    trained = Tokens(tokens.frames[:-VALIDATION_DRIVES], tokens.actions[:-VALIDATION_DRIVES])
    validation = Tokens(tokens.frames[-VALIDATION_DRIVES:], tokens.actions[-VALIDATION_DRIVES:])
    unfinished = out / "training.pt"
    first = _resume(unfinished, model, optimizers, (steps, seed))
    shares: dict[str, float] = {}
    average = math.nan
    began = time.monotonic()
    bar = tqdm(range(first, steps), "world model", initial=first, total=steps, unit="step")
    for step in bar:
        rng = np.random.default_rng((seed, step))
        is_short = step < SHORT_PART * steps
        num_frames = WINDOW_FRAMES[0] if is_short else int(rng.choice(WINDOW_FRAMES, p=WINDOW_SHARES))
        size = POSITIONS_PER_STEP // (model.config.num_spatio_embeddings * num_frames)
        frames, actions, moments = trained.windows(rng, size, num_frames)
        logits = predict(model, damaged(frames, rng), actions, moments)
        loss = loss_of(logits, frames, by_ego(actions, *grid))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, 2 * (1 - step / steps))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["highest_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
        average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
        if (step + 1) % CHECK_EVERY == 0:
            shares = check(model, validation, grid)
        if (step + 1) % SAVE_EVERY == 0:
            _save(unfinished, model, optimizers, (steps, seed), step + 1)
            save(model, out)
        percentages = {name: f"{share:.1%}" for name, share in shares.items()}
        bar.set_postfix(loss=f"{average:.3f}", **percentages, refresh=False)
    save(model, out)
    unfinished.unlink(missing_ok=True)
    print(f"{steps - first} steps in {(time.monotonic() - began) / 60:.0f} minutes")


def save(model: LlamaActionForCausalLM, out: Path) -> None:
    """Write a checkpoint whose file has 16 bits a number; its config says float32, in which models compute."""
    model.save_pretrained(out, state_dict={name: weight.half() for name, weight in model.state_dict().items()})


def _save(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], run: Any, step: int) -> None:
    states = [optimizer.state_dict() for optimizer in optimizers]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"run": run, "step": step, "model": model.state_dict(), "optimizers": states}, path)


def _resume(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], run: Any) -> int:
    """The step with which training goes on."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    if state["run"] != run:
        raise typer.BadParameter(f"{path}: expected a run of --steps and --seed {run}, got {state['run']}. Remove it.")
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])


def main(
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 3900,
    seed: Annotated[int, typer.Option(help="Of weights and windows.", min=0)] = 0,
    data: Annotated[Path, typer.Option(help="Folder of the recordings.")] = DATA,
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer.")] = CHECKPOINT,
    out: Annotated[Path, typer.Option(help="Where to save the checkpoint.")] = CHECKPOINT,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 2,
) -> None:
    """Train a world model. A run that broke off goes on where it was last saved."""
    torch.set_num_threads(threads)
    files = training_files(data)
    if not files:
        expected = f"recordings from seed {FIRST_TRAINING_SEED} on"
        remedy = "Run python -m examples.terra.drive.record first."
        raise typer.BadParameter(f"--data {data}: expected {expected}, got none. {remedy}")
    images = Tokenizer.load(tokenizer)
    tokens = read(files, images)
    torch.manual_seed(seed)
    grid = images.config.rows, images.config.cols
    train(tokens, make_model(images), grid, steps, seed, out)


if __name__ == "__main__":
    typer.run(main)
