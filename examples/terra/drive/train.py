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

from .. import CHECKPOINT
from ..configuration import LlamaActionConfig
from ..reference import LlamaActionForCausalLM
from ..worlds import TOWN
from .data import Tokens, record_tokens
from .drives import FIRST_TRAINING_SEED, NUM_FRAMES, NUM_WAYPOINTS
from .muon import Muon
from .simulator import CELL_PIXELS, CELLS, COLOURS, EGO, render
from .tokenizer import Tokenizer

POSITIONS_PER_STEP = 2240
"""Positions of a batch, whatever the length of its windows: 16 windows of 2 frames."""

SHORT_STEPS = 600
"""Steps with short windows, at first."""

SHORT_FRAMES = 2
"""Frames of a short window: it has one action, and the model learns to read it."""

WINDOW_FRAMES = (4, 8, NUM_FRAMES)
"""Frames of the windows afterwards."""

WINDOW_SHARES = (0.5, 0.3, 0.2)
"""How often each of these is drawn."""

MUON_LR = 0.006
ADAMW_LR = 0.002

WARM_UP_STEPS = 100
"""In so many steps the learning rates rise."""

COOL_DOWN = 0.55
"""In this last part of the training the learning rates fall to nothing."""

VEHICLE_WEIGHT = 4.0
"""How much more a token counts where a vehicle is or was, which are few beside all that never changes."""

EGO_WEIGHT = 10.0
"""How much more a token counts where the ego vehicle is or was: where it goes is what a model of actions is for."""

MOST_DAMAGE = 0.05
"""Largest share of a long window's tokens that is replaced before the model reads them."""

GAP_SHARE = 0.1
"""How many of a long window's frames have a rectangle of another drive in them: a vehicle that is lost, or one that
never was."""

GAP_CELLS = 4
"""The most cells along the sides of such a rectangle."""

NUM_WAVES = 9
"""Numbers from which the place of a token along one axis is embedded at first."""

CHECK_EVERY = 50
SAVE_EVERY = 50

VALIDATION_DRIVES = 100
"""The last of the training drives, which are measured on and not trained on."""


def make_config(tokenizer: Tokenizer) -> LlamaActionConfig:
    """Return the sizes of the model: the published layout, made small."""
    tokens = CELLS**2
    placeholder = len(tokenizer.codebook)
    return LlamaActionConfig(
        vocab_size=placeholder + 1,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
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
        image_tokenizer=TOWN,
    )


def make_model(tokenizer: Tokenizer) -> LlamaActionForCausalLM:
    """Return a freshly initialised model."""
    model = LlamaActionForCausalLM(make_config(tokenizer))
    # alike where patches look alike, so that what is learned of one vehicle serves for the others
    patches = torch.from_numpy(tokenizer.codebook).permute(0, 3, 1, 2).float()
    looks = nn.functional.avg_pool2d(patches, CELL_PIXELS // 4).flatten(1)
    looks = (looks - looks.mean(0)) / looks.std()
    table = model.model.embed_tokens.weight.data
    table[:-1] = 0.05 * torch.randn_like(table[:-1]) + 0.02 * looks @ torch.randn(looks.shape[1], table.shape[1])
    nn.init.normal_(model.action_projection.weight.data, std=0.5)
    nn.init.normal_(model.action_projection.bias.data, std=0.3)
    # smooth in row and column, so that what is learned in one place serves in the others
    table = model.pos_embedding_spatio_temporal.spatio_embeddings.weight.data
    rows = _make_waves(CELLS) @ torch.randn(NUM_WAVES, table.shape[1])
    cols = _make_waves(CELLS) @ torch.randn(NUM_WAVES, table.shape[1])
    table[: model.config.num_image_patches] = 0.1 * (rows[:, None] + cols).flatten(0, 1)
    return model


def _make_waves(count: int) -> Tensor:
    """Return places along one axis as smooth numbers: float (count, NUM_WAVES).

    These are the place, and waves of several lengths.
    """
    places = torch.linspace(-1, 1, count)[:, None]
    angles = math.pi / 2 * places * torch.arange(1, NUM_WAVES // 2 + 1)
    return torch.cat([places, angles.sin(), angles.cos()], dim=1)


def make_optimizers(model: LlamaActionForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for all other weights."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    is_matrix = set(matrices)
    other_weights = [weight for weight in model.parameters() if weight not in is_matrix]
    adamw = torch.optim.AdamW(other_weights, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, lr=MUON_LR), adamw]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["highest_lr"] = group["lr"]
    return optimizers


def predict(model: LlamaActionForCausalLM, frames: Tensor, actions: Tensor, moments: Tensor) -> Tensor:
    """Predict every frame but the first from the frames before it.

    Args:
        model: the model.
        frames: int64 (batch, frames, tokens).
        actions: float32 (batch, frames - 1, waypoints, 3).
        moments: when each first frame is, int64 (batch, 1).

    Returns:
        Logits, float32 (batch, frames - 1, tokens, vocab).
    """
    config = model.config
    input_ids = model.interleave(frames)[:, : -config.num_action_tokens]
    position_ids = moments * config.num_spatio_embeddings + torch.arange(input_ids.shape[1])
    firsts = torch.arange(1, frames.shape[1])[:, None] * config.num_spatio_embeddings
    predictors = (firsts + torch.arange(config.num_image_patches) - 1).flatten()
    logits: Tensor = model(
        input_ids, actions.flatten(0, 1), position_ids=position_ids, use_cache=False, logits_to_keep=predictors
    ).logits
    return logits.view(len(frames), -1, config.num_image_patches, config.vocab_size)


def misread(guesses: Tensor, frames: Tensor, rng: np.random.Generator) -> Tensor:
    """Return what the model reads in place of the frames of windows, as a rollout reads its own mistakes.

    Args:
        guesses: int64 (batch, frames - 1, tokens), what the model itself predicts of all frames but the first.
        frames: int64 (batch, frames, tokens). What other windows have in the same place replaces some tokens, up to
            MOST_DAMAGE of a window, and rectangles of some frames, GAP_SHARE of them.
        rng: of the choices.
    """
    guessed_frames = torch.cat([frames[:, :1], guesses], dim=1)
    shares = torch.from_numpy(MOST_DAMAGE * rng.random((len(frames), 1, 1)) ** 3)
    is_damaged = torch.from_numpy(rng.random(frames.shape)) < shares
    sides = rng.integers(1, GAP_CELLS + 1, (2, *frames.shape[:2], 1))
    firsts = rng.integers(1 - sides, CELLS)
    # the rectangles along both axes: bool (2, batch, frames, CELLS)
    is_row, is_col = (firsts <= np.arange(CELLS)) & (np.arange(CELLS) < firsts + sides)
    is_gap = (is_row[..., :, None] & is_col[..., None, :]).reshape(frames.shape)
    is_gap &= rng.random((*frames.shape[:2], 1)) < GAP_SHARE
    other_windows = frames[torch.from_numpy(rng.permutation(len(frames)))]
    return torch.where(is_damaged | torch.from_numpy(is_gap), other_windows, guessed_frames)


def find_ego_ids(tokenizer: Tokenizer) -> Tensor:
    """Return which ids show a part of the ego vehicle: bool (ids,)."""
    differences = np.abs(tokenizer.codebook.astype(int) - np.array(COLOURS[EGO])).max(-1)
    return torch.from_numpy((differences < 20).any((1, 2)))


def encode_empty_town(tokenizer: Tokenizer) -> Tensor:
    """Return the ids of the town without vehicles: int64 (tokens,)."""
    return torch.from_numpy(tokenizer.encode(render([])))


def compute_loss(logits: Tensor, frames: Tensor, empty: Tensor, is_ego: Tensor) -> Tensor:
    """Return the cross entropy, in which tokens count more where vehicles are or were."""
    losses = nn.functional.cross_entropy(logits.flatten(0, 2), frames[:, 1:].flatten(), reduction="none")
    shows_vehicle = frames != empty
    weights = 1 + (VEHICLE_WEIGHT - 1) * (shows_vehicle[:, 1:] | shows_vehicle[:, :-1])
    weights[is_ego[frames[:, 1:]] | is_ego[frames[:, :-1]]] = EGO_WEIGHT
    return (losses * weights.flatten()).sum() / weights.sum()


@torch.no_grad()
def check(model: LlamaActionForCausalLM, tokens: Tokens, is_ego: Tensor, num_frames: int) -> dict[str, float]:
    """Return the shares of right predictions on windows that are not trained on.

    These are the shares of tokens that changed, of tokens of the ego vehicle, and of frames without an error.
    """
    frames, actions, moments = tokens.draw_windows(np.random.default_rng(0), 48, num_frames)
    truth = frames[:, 1:]
    is_right = (predict(model, frames, actions, moments).argmax(-1) == truth).float()
    groups = {"changed": truth != frames[:, :-1], "ego": is_ego[truth]}
    shares = {name: is_right[group].mean().item() for name, group in groups.items()}
    return shares | {"frames": is_right.amin(-1).mean().item()}


def train(
    tokens: Tokens, model: LlamaActionForCausalLM, tokenizer: Tokenizer, steps: int, seed: int, out: Path
) -> None:
    """Train a model, from where the last run broke off if there was one, and save it into a folder."""
    empty = encode_empty_town(tokenizer)
    is_ego = find_ego_ids(tokenizer)
    optimizers = make_optimizers(model)
    training = Tokens(tokens.frames[:-VALIDATION_DRIVES], tokens.actions[:-VALIDATION_DRIVES])
    validation = Tokens(tokens.frames[-VALIDATION_DRIVES:], tokens.actions[-VALIDATION_DRIVES:])
    unfinished = out / "training.pt"
    first = _resume(unfinished, model, optimizers, (steps, seed))
    guesses = torch.empty(0)
    shares: dict[str, float] = {}
    average = math.nan
    start = time.monotonic()
    bar = tqdm(range(first, steps), "world model", initial=first, total=steps, unit="step")
    for step in bar:
        # of two steps, the second one has the windows of the first one, as the model guessed them then
        is_short = step < SHORT_STEPS
        is_second = not is_short and step % 2 == 1
        rng = np.random.default_rng((seed, step - is_second))
        num_frames = SHORT_FRAMES
        if not is_short:
            num_frames = int(rng.choice(WINDOW_FRAMES, p=WINDOW_SHARES))
        size = POSITIONS_PER_STEP // (model.config.num_spatio_embeddings * num_frames)
        frames, actions, moments = training.draw_windows(rng, size, num_frames)
        frames_read = frames
        if is_second:
            frames_read = misread(guesses, frames, rng)
        logits = predict(model, frames_read, actions, moments)
        guesses = logits.detach()[..., : model.placeholder_id].argmax(-1)
        loss = compute_loss(logits, frames, empty, is_ego)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, (1 - step / steps) / COOL_DOWN)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["highest_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
        if math.isnan(average):
            average = loss.item()
        else:
            average = 0.98 * average + 0.02 * loss.item()
        if (step + 1) % CHECK_EVERY == 0:
            shares = check(model, validation, is_ego, min(num_frames, WINDOW_FRAMES[0]))
        if (step + 1) % SAVE_EVERY == 0:
            _save_state(unfinished, model, optimizers, (steps, seed), step + 1)
            save(model, out)
        percentages = {name: f"{share:.1%}" for name, share in shares.items()}
        bar.set_postfix(loss=f"{average:.3f}", **percentages, refresh=False)
    save(model, out)
    unfinished.unlink(missing_ok=True)
    print(f"{steps - first} steps in {(time.monotonic() - start) / 60:.0f} minutes")


def save(model: LlamaActionForCausalLM, out: Path) -> None:
    """Write a checkpoint whose file has 16 bits a number; its config says float32, in which models compute."""
    weights = {name: weight.half() for name, weight in model.state_dict().items()}
    model.save_pretrained(out, state_dict=weights)


def _save_state(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], run: Any, step: int) -> None:
    """Write all that `_resume` reads: the run is what has to be equal then."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"run": run, "step": step, "model": model.state_dict(), "optimizers": states}, path)


def _resume(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], run: Any) -> int:
    """Load what the last run saved, and return the step with which training goes on.

    Raises:
        typer.BadParameter: the last run had other options.
    """
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
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 10_000,
    drives: Annotated[int, typer.Option(help="Drives to train on.", min=VALIDATION_DRIVES + 1)] = 2500,
    seed: Annotated[int, typer.Option(help="Of weights and windows.", min=0)] = 0,
    data: Annotated[Path, typer.Option(help="Where to keep the tokens of the drives.")] = Path("out/drive.npz"),
    out: Annotated[Path, typer.Option(help="Where to save the checkpoint.")] = CHECKPOINT,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 2,
) -> None:
    """Record drives, learn a codebook and train a world model. A run that broke off goes on where it was last saved."""
    torch.set_num_threads(threads)
    seeds = range(FIRST_TRAINING_SEED, FIRST_TRAINING_SEED + drives)
    tokens, tokenizer = record_tokens(seeds, data)
    tokenizer.save(out)
    torch.manual_seed(seed)
    train(tokens, make_model(tokenizer), tokenizer, steps, seed, out)


if __name__ == "__main__":
    typer.run(main)
