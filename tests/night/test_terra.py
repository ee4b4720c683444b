"""Terra's other engines: those that draft frames, of the road world and of a simulator's drives; the policy that
learns in the dream."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.terra import CHECKPOINT, learn, worlds
from examples.terra import __main__ as demo
from examples.terra.drafts import FRAME_TOKENS
from examples.terra.drive import CHECKPOINT as DRIVES
from examples.terra.environment import TrueTiles
from examples.terra.learn import chance
from examples.terra.reference import LlamaActionForCausalLM
from examples.terra.world import CONTEXT_FRAMES
from tests.engine.processes import engines_in_this_process
from tests.engine.terra.rollouts import PAD, engine, generate, stacked


@pytest.fixture(scope="module")
def engines() -> Iterator[ExitStack]:
    with engines_in_this_process() as stack:
        yield stack


@pytest.fixture(scope="module")
def drafting(engines: ExitStack) -> Any:
    return engine(engines, drafts=FRAME_TOKENS)


def expected(model: Path, frames: np.ndarray, actions: np.ndarray) -> np.ndarray:
    reference = LlamaActionForCausalLM.from_pretrained(model).eval()
    steps = reference.rollout(torch.from_numpy(frames[:, :CONTEXT_FRAMES]), torch.from_numpy(actions), 22)
    return torch.stack(list(steps), dim=1).numpy()


def test_drafts_of_frames_save_steps_and_change_no_id(drafting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams at once and one by one, to the last frame that the model holds; also where the model itself wants the
    placeholder, as vLLM makes no logits processors for drafts, and takes no bias."""
    frames, actions = stacked(range(200, 203))
    tokens = expected(CHECKPOINT, frames, actions)
    assert np.array_equal(generate(drafting, frames, actions), tokens)

    def wanted(module: torch.nn.Module, arguments: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([PAD]), 1e4)

    (hook,) = drafting.llm.apply_model(lambda model: model.logits_processor.register_forward_hook(wanted))
    assert np.array_equal(generate(drafting, frames[:1], actions[:1], 3), tokens[:1, :3])
    hook.remove()
    steps, step = count(), drafting.llm.llm_engine.step
    monkeypatch.setattr(drafting.llm.llm_engine, "step", lambda: (next(steps), step())[1])
    for one in range(3):
        only = slice(one, one + 1)
        assert np.array_equal(generate(drafting, frames[only], actions[only]), tokens[only])
    assert next(steps) <= 5 * 3 * 22


def test_the_demo(drafting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, with the engine that is there."""
    monkeypatch.setattr("examples.terra.rollout.VllmTerra", lambda *args, **options: drafting)
    demo.main(model=CHECKPOINT, frames=2, streams=2, seed=7, out=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"terra.gif", "terra.mp4", "terra.png", "terra.json"}
    report = json.loads((tmp_path / "terra.json").read_text())
    assert report["identical_tokens"]
    assert report["vLLM"]["token_accuracy"] == 1.0
    assert report["vLLM"]["prompt_tokens"] == [3 * 70, 4 * 70]


def test_a_policy_learns(drafting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, with the engine that is there: a little in the dream, more in the true world."""
    monkeypatch.setattr(learn, "VllmTerra", lambda *args, **options: drafting)
    learn.main(rounds=1, out=tmp_path, streams=8, seed=0, judged=8, drafts=0, log_level="ERROR")
    report = json.loads((tmp_path / "learn.json").read_text())
    assert report["chance, on the roads"]["true"] == report["chance, on the roads"]["dream"]
    assert report["off the roads"]["map moved"] > report["off the roads"]["map where it was"]
    learnt = learn.learnt("true world", TrueTiles(), streams=32, rounds=4, seed=0)
    guessed, known = (learn.returns(TrueTiles(), policy, 40).mean() for policy in (chance(0, legal=True), learnt))
    assert known > 2 * guessed


def test_drives_of_a_simulator_follow_the_actions(engines: ExitStack) -> None:
    """Complete rollouts of 5 drives never seen, from camera frames, and with an ego vehicle that is told to stand."""
    drive = engine(engines, DRIVES, drafts=FRAME_TOKENS)
    world = worlds.of_config(drive.config)
    episodes = [world.episode(seed) for seed in range(5)]
    frames, actions = np.stack([e.tokens for e in episodes]), np.stack([e.actions for e in episodes])
    tokens = generate(drive, frames, actions)
    assert np.array_equal(tokens, expected(DRIVES, frames, actions))
    assert np.array_equal(tokens, generate(engine(engines, DRIVES), frames, actions))

    def compared(tokens: np.ndarray, truth: list[worlds.Episode], figure: str) -> float:
        pairs = zip(tokens, truth, strict=True)
        return float(np.mean([world.compare(own, CONTEXT_FRAMES, e)[figure] for own, e in pairs]))

    assert compared(tokens, episodes, "persistence") >= 0.95
    assert compared(tokens, episodes, "ego_in_place") >= 0.95
    actions[:, CONTEXT_FRAMES - 1 :, :, :2] = 0
    standing = [replace(e, pictures=e.pictures[[CONTEXT_FRAMES - 1] * len(e.pictures)]) for e in episodes]
    assert compared(generate(drive, frames, actions), standing, "ego_in_place") >= 0.9
