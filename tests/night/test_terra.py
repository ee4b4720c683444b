"""Terra's engines that draft frames, the demo, the quality of the world, and the policy that learns in the dream."""

import json
from contextlib import ExitStack
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
FRAMES_OF_ROLLOUT = 22


@pytest.fixture(scope="module")
def drafting(engines: ExitStack) -> Any:
    return start_engine(engines, drafts=FRAME_TOKENS)


def test_drafts_of_frames_save_steps_and_change_no_id(drafting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are generated at once and one by one, to the last frame that the model holds."""
    frames, actions = stack_episodes(range(200, 203))
    expected = generate_by_reference(frames, actions)
    assert np.array_equal(generate(drafting, frames, actions), expected)

    engine = drafting.llm.llm_engine
    step = engine.step
    num_steps = 0

    def step_and_count() -> Any:
        nonlocal num_steps
        num_steps += 1
        return step()

    monkeypatch.setattr(engine, "step", step_and_count)
    for stream in range(3):
        tokens = generate(drafting, frames[stream : stream + 1], actions[stream : stream + 1])
        assert np.array_equal(tokens[0], expected[stream])
    steps_per_frame = num_steps / (3 * FRAMES_OF_ROLLOUT)
    assert steps_per_frame <= 11


def test_drafts_keep_to_frames_where_the_model_prefers_the_placeholder(drafting: Any) -> None:
    """vLLM makes no logits processors for drafts, and accepts no bias."""
    frames, actions = stack_episodes(range(200, 201))

    def prefer_placeholder(module: torch.nn.Module, arguments: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([PAD]), 1e4)

    def register_hook(model: Any) -> Any:
        return model.logits_processor.register_forward_hook(prefer_placeholder)

    (hook,) = drafting.llm.apply_model(register_hook)
    try:
        tokens = generate(drafting, frames, actions, 3)
    finally:
        hook.remove()

    assert np.array_equal(tokens, generate_by_reference(frames, actions, 3))


def test_the_demo_writes_a_report_and_pictures(drafting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in this process, with the engine of the other tests."""

    def get_engine(*args: Any, **options: Any) -> Any:
        return drafting

    monkeypatch.setattr("examples.terra.rollout.VllmTerra", get_engine)

    demo.main(model=CHECKPOINT, frames=2, streams=2, seed=7, out=tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {"terra.gif", "terra.mp4", "terra.png", "terra.json"}
    report = json.loads((tmp_path / "terra.json").read_text())
    assert report["identical_tokens"]
    assert report["vLLM"]["ego_in_place"] == 1.0
    assert report["vLLM"]["prompt_tokens"] == [3 * 70, 4 * 70]


def test_a_policy_learns(drafting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns a little in the dream, by the command with the engine of the other tests, and more in the true town."""

    def get_engine(*args: Any, **options: Any) -> Any:
        return drafting

    monkeypatch.setattr(learn, "VllmTerra", get_engine)
    learn.main(rounds=1, out=tmp_path, streams=8, seed=0, judged=8, drafts=0, log_level="ERROR")
    report = json.loads((tmp_path / "learn.json").read_text())
    assert np.mean(report["chance"]["true"]) > 0

    town = TrueTown(WORLD)
    policy = learn.learn("true town", town, streams=32, rounds=3, seed=0)
    returns_of_chance = learn.measure_returns(town, learn.choose_at_random(0), 40)
    returns_of_policy = learn.measure_returns(town, policy, 40)
    assert returns_of_policy.mean() > 1.5 * returns_of_chance.mean()


def find_ego_places(video: Any) -> list[list[Any]]:
    """Return the places of the ego vehicle in each frame of a video; it is green."""
    places = []
    for frame in video:
        places.append([blob.place.tolist() for blob in endless.blobs(frame) if blob.colour == "green"])
    return places


def test_vehicles_persist_and_the_ego_vehicle_follows_its_actions(drafting: Any) -> None:
    """Complete rollouts of 5 drives that were not trained on."""
    frames, actions = stack_episodes(range(5))
    tokens = generate(drafting, frames, actions)
    assert np.array_equal(tokens, generate_by_reference(frames, actions))

    figures = [judge(WORLD.pictures(tokens[seed]), record(seed)) for seed in range(5)]

    assert np.mean([figures_of_drive["persistence"] for figures_of_drive in figures]) >= 95
    assert np.mean([figures_of_drive["ego"] for figures_of_drive in figures]) >= 95


def test_an_ego_vehicle_stops_by_its_actions(drafting: Any) -> None:
    frames, actions = stack_episodes(range(5))
    actions[:, CONTEXT_FRAMES - 1 :, :, :2] = 0

    tokens = generate(drafting, frames, actions)

    is_right = []
    for seed in range(5):
        places = find_ego_places(WORLD.pictures(tokens[seed]))
        true_places = find_ego_places(follow_actions(seed, actions[seed]))
        assert len(places) == FRAMES_OF_ROLLOUT
        for place, true_place in zip(places, true_places, strict=True):
            is_right.append(place == true_place)
    assert np.mean(is_right) >= 0.95


def test_a_world_does_not_fade(drafting: Any) -> None:
    """A driver looks at 200 frames, far more than the model holds."""
    figures = endless.drive(drafting, WORLD, 200, 300, keep=13)
    for name in ("vehicles there", "others in place"):
        begin, *_, end = figures["parts"][name]
        assert end >= 0.9 * begin >= 0.75, name
