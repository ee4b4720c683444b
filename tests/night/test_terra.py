"""Terra's engines that draft frames, the demo, how good the world is, and the policy that learns in the dream."""

import json
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.terra import CHECKPOINT, learn
from examples.terra import __main__ as demo
from examples.terra.drafts import FRAME_TOKENS
from examples.terra.drive import endless
from examples.terra.drive.judge import follow_actions, judge
from examples.terra.drive.simulator import record
from examples.terra.environment import TrueTown
from examples.terra.worlds import CONTEXT_FRAMES, TownWorld
from tests.engine.terra.rollouts import PAD, generate, generate_by_reference, stack_episodes, start_engine

WORLD = TownWorld()


@pytest.fixture(scope="module")
def drafting(engines: ExitStack) -> Any:
    return start_engine(engines, drafts=FRAME_TOKENS)


def test_drafts_of_frames_save_steps_and_change_no_id(drafting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams at once and one by one, to the last frame that the model holds; also where the model itself wants the
    placeholder, as vLLM makes no logits processors for drafts, and takes no bias."""
    frames, actions = stack_episodes(range(200, 203))
    tokens = generate_by_reference(frames, actions)
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
    assert next(steps) <= 11 * 3 * 22


def test_a_demo(drafting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, with the engine that is there."""
    monkeypatch.setattr("examples.terra.rollout.VllmTerra", lambda *args, **options: drafting)
    demo.main(model=CHECKPOINT, frames=2, streams=2, seed=7, out=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"terra.gif", "terra.mp4", "terra.png", "terra.json"}
    report = json.loads((tmp_path / "terra.json").read_text())
    assert report["identical_tokens"]
    assert report["vLLM"]["ego_in_place"] == 1.0
    assert report["vLLM"]["prompt_tokens"] == [3 * 70, 4 * 70]


def test_a_policy_learns(drafting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, with the engine that is there: a little in the dream, more in the true town."""
    monkeypatch.setattr(learn, "VllmTerra", lambda *args, **options: drafting)
    learn.main(rounds=1, out=tmp_path, streams=8, seed=0, judged=8, drafts=0, log_level="ERROR")
    report = json.loads((tmp_path / "learn.json").read_text())
    assert np.mean(report["chance"]["true"]) > 0
    town = TrueTown(WORLD)
    learnt = learn.learn("true town", town, streams=32, rounds=3, seed=0)
    guessed, known = (learn.measure_returns(town, policy, 40).mean() for policy in (learn.choose_at_random(0), learnt))
    assert known > 1.5 * guessed


def test_every_vehicle_is_there_and_the_ego_vehicle_does_as_it_is_told(drafting: Any) -> None:
    """Complete rollouts of 5 drives never seen; also of an ego vehicle that is told to stand."""
    frames, actions = stack_episodes(range(5))
    drives = [record(seed) for seed in range(5)]
    tokens = generate(drafting, frames, actions)
    assert np.array_equal(tokens, generate_by_reference(frames, actions))
    shown = [judge(WORLD.pictures(own), drive) for own, drive in zip(tokens, drives, strict=True)]
    assert np.mean([figures["persistence"] for figures in shown]) >= 95
    assert np.mean([figures["ego"] for figures in shown]) >= 95
    actions[:, CONTEXT_FRAMES - 1 :, :, :2] = 0
    right = []
    for seed, own in enumerate(generate(drafting, frames, actions)):
        ego = [[blob.place.tolist() for blob in endless.blobs(frame) if blob.colour == "green"]
               for video in (WORLD.pictures(own), follow_actions(seed, actions[seed])) for frame in video]  # fmt: skip
        right += [shown == true for shown, true in zip(ego[:22], ego[22:], strict=True)]
    assert np.mean(right) >= 0.95


def test_a_world_does_not_fade(drafting: Any) -> None:
    """200 frames beyond what the model holds, and a driver who looks at them."""
    figures = endless.drive(drafting, WORLD, 200, 300, keep=13)
    for name in ("vehicles there", "others in place"):
        begin, *_, end = figures["parts"][name]
        assert end >= 0.9 * begin >= 0.75, name
