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
SHORT_FRAMES, SHORT_STEPS = 2, 600
"""Length of the windows at first: they have one action, and the model learns to read it."""
WINDOW_FRAMES, WINDOW_SHARES = (4, 8, NUM_FRAMES), (0.5, 0.3, 0.2)
"""Their lengths afterwards, and how often each is drawn."""
MUON_LR, ADAMW_LR = 0.006, 0.002
WARM_UP_STEPS, COOL_DOWN = 100, 0.55
"""In how many steps the learning rates rise, and in which last part of the training they fall to nothing."""
VEHICLE_WEIGHT, EGO_WEIGHT = 4.0, 10.0
"""How much more a token counts where a vehicle is or was, which are few beside all that never changes; and where the
ego vehicle is or was: where it goes is what a model of actions is for."""
MOST_DAMAGE = 0.05
"""Largest share of a long window's tokens that is replaced before the model reads them."""
GAP_SHARE, GAP_CELLS = 0.1, 4
"""How many of a long window's frames have a rectangle of another drive in them, and the most cells along its sides: a
vehicle that is lost, or one that never was."""
NUM_WAVES = 9
"""Numbers from which the place of a token along one axis is embedded at first."""
CHECK_EVERY, SAVE_EVERY = 50, 50
VALIDATION_DRIVES = 100
"""The last of the training drives, which are measured on and not trained on."""


def make_config(tokenizer: Tokenizer) -> LlamaActionConfig:
    """Return the sizes of the model: the published layout, made small."""
    tokens, placeholder = CELLS**2, len(tokenizer.codebook)
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
    rows, cols = (_waves(CELLS) @ torch.randn(NUM_WAVES, table.shape[1]) for _ in range(2))
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
    chosen = set(matrices)
    rest = [weight for weight in model.parameters() if weight not in chosen]
    adamw = torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = [Muon(matrices, lr=MUON_LR), adamw]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["highest_lr"] = group["lr"]
    return optimizers


def predict(model: LlamaActionForCausalLM, frames: Tensor, actions: Tensor, moments: Tensor) -> Tensor:
    """Predict every frame but the first from the frames before it.

    Args:
        model: the model.
        frames: int64 (batch, frames, tokens).
        actions: float32 (batch, frames - 1, waypoints, 3).
        moments: that of each first frame, int64 (batch, 1).

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
    """What the model reads in place of the frames of windows, as a rollout reads its own mistakes.

    Args:
        guesses: int64 (batch, frames - 1, tokens), what the model itself predicts of all frames but the first.
        frames: int64 (batch, frames, tokens). What other windows have in the same place replaces some tokens, up to
            MOST_DAMAGE of a window, and rectangles of some frames, GAP_SHARE of them.
        rng: of the choices.
    """
    read = torch.cat([frames[:, :1], guesses], dim=1)
    shares = torch.from_numpy(MOST_DAMAGE * rng.random((len(frames), 1, 1)) ** 3)
    is_damaged = torch.from_numpy(rng.random(frames.shape)) < shares
    sides = rng.integers(1, GAP_CELLS + 1, (2, *frames.shape[:2], 1))
    firsts = rng.integers(1 - sides, CELLS)
    is_row, is_col = ((first <= np.arange(CELLS)) & (np.arange(CELLS) < first + side)
                      for first, side in zip(firsts, sides, strict=True))  # fmt: skip
    is_gap = (is_row[..., :, None] & is_col[..., None, :]).reshape(frames.shape)
    is_gap &= rng.random((*frames.shape[:2], 1)) < GAP_SHARE
    others = frames[torch.from_numpy(rng.permutation(len(frames)))]
    return torch.where(is_damaged | torch.from_numpy(is_gap), others, read)


def ego_ids(tokenizer: Tokenizer) -> Tensor:
    """Which ids show some of the ego vehicle: bool (ids,)."""
    differences = np.abs(tokenizer.codebook.astype(int) - np.array(COLOURS[EGO])).max(-1)
    return torch.from_numpy((differences < 20).any((1, 2)))


def empty_ids(tokenizer: Tokenizer) -> Tensor:
    """Ids of the town without vehicles: int64 (tokens,)."""
    return torch.from_numpy(tokenizer.encode(render([])))


def loss_of(logits: Tensor, frames: Tensor, empty: Tensor, is_ego: Tensor) -> Tensor:
    """Cross entropy, in which tokens of vehicles count more, and those where they were."""
    losses = nn.functional.cross_entropy(logits.flatten(0, 2), frames[:, 1:].flatten(), reduction="none")
    shows = frames != empty
    weights = 1 + (VEHICLE_WEIGHT - 1) * (shows[:, 1:] | shows[:, :-1])
    weights[is_ego[frames[:, 1:]] | is_ego[frames[:, :-1]]] = EGO_WEIGHT
    return (losses * weights.flatten()).sum() / weights.sum()


@torch.no_grad()
def check(model: LlamaActionForCausalLM, tokens: Tokens, is_ego: Tensor, num_frames: int) -> dict[str, float]:
    """The share of right tokens on windows that are not trained on: of those that changed, and of the ego vehicle; and
    of frames without an error."""
    frames, actions, moments = tokens.windows(np.random.default_rng(0), 48, num_frames)
    truth = frames[:, 1:]
    is_right = (predict(model, frames, actions, moments).argmax(-1) == truth).float()
    groups = {"changed": truth != frames[:, :-1], "ego": is_ego[truth]}
    shares = {name: is_right[group].mean().item() for name, group in groups.items()}
    return shares | {"frames": is_right.amin(-1).mean().item()}


def train(
    tokens: Tokens, model: LlamaActionForCausalLM, tokenizer: Tokenizer, steps: int, seed: int, out: Path
) -> None:
    """Train a model, from where the last run broke off if there was one; saves it into a folder."""
    empty, is_ego = empty_ids(tokenizer), ego_ids(tokenizer)
    optimizers = make_optimizers(model)
    trained = Tokens(tokens.frames[:-VALIDATION_DRIVES], tokens.actions[:-VALIDATION_DRIVES])
    validation = Tokens(tokens.frames[-VALIDATION_DRIVES:], tokens.actions[-VALIDATION_DRIVES:])
    unfinished = out / "training.pt"
    first = _resume(unfinished, model, optimizers, (steps, seed))
    guesses, shares = torch.empty(0), dict[str, float]()
    average = math.nan
    began = time.monotonic()
    bar = tqdm(range(first, steps), "world model", initial=first, total=steps, unit="step")
    for step in bar:
        # of two steps, the second one has the windows of the first one, as the model guessed them then
        is_short, is_again = step < SHORT_STEPS, step % 2 == 1 and step >= SHORT_STEPS
        rng = np.random.default_rng((seed, step - is_again))
        num_frames = SHORT_FRAMES if is_short else int(rng.choice(WINDOW_FRAMES, p=WINDOW_SHARES))
        size = POSITIONS_PER_STEP // (model.config.num_spatio_embeddings * num_frames)
        frames, actions, moments = trained.windows(rng, size, num_frames)
        read = misread(guesses, frames, rng) if is_again else frames
        logits = predict(model, read, actions, moments)
        guesses = logits.detach()[..., : model.placeholder_id].argmax(-1)
        loss = loss_of(logits, frames, empty, is_ego)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, (1 - step / steps) / COOL_DOWN)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["highest_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
        average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
        if (step + 1) % CHECK_EVERY == 0:
            shares = check(model, validation, is_ego, min(num_frames, WINDOW_FRAMES[0]))
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
