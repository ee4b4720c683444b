"""The robot of the examples: its world, its actions, what is written of a run, and the checkpoint in transformers."""

import json
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from examples.reacher import CHECKPOINT
from examples.reacher.__main__ import SEEDS, load_planner
from examples.reacher.dream.__main__ import write_lines
from examples.reacher.dream.places import NUM_PLACES, decode_places, encode_places
from examples.reacher.environment import ReacherEnv, TrueWorld
from examples.reacher.film import choose_scenes, count_actions, write_film
from examples.reacher.report import Result, write_line, write_table
from examples.reacher.spec import REACHER
from examples.reacher.train import demonstrate, prepare
from examples.reacher.untrained import make_model, make_tokenizer
from examples.reacher.world import (
    DISC_RADIUS,
    MAX_DELTA,
    STEPS,
    Scenes,
    draw_scenes,
    locate_elbows,
    locate_tips,
    move_tips,
    observe,
    plan_as_expert,
    run_episodes,
)
from tests import ROOT
from tests.profiles import scaled

DATA = ROOT / "docs" / "data" / "robot.json"
RESULTS = [Result(**result) for result in json.loads(DATA.read_text())]
SCENES = draw_scenes(np.random.default_rng(SEEDS[0]), 30)


def make_processor() -> object:
    tokenizer = make_tokenizer()
    return REACHER.hf_processor(make_model(0, len(tokenizer)).config, tokenizer)


@settings(max_examples=scaled(20))
@given(st.integers(0, 2**32), st.floats(0, MAX_DELTA), st.floats(0, 6.3))
def test_a_tip_moves_by_the_action_and_the_links_keep_their_lengths(seed: int, length: float, angle: float) -> None:
    joints = draw_scenes(np.random.default_rng(seed), 1).joints
    delta = length * np.array([[np.cos(angle), np.sin(angle)]])
    moved = move_tips(joints, delta)
    place = locate_tips(joints) + delta
    if 0.06 < np.linalg.norm(place) < 0.94:  # within reach
        assert np.allclose(locate_tips(moved), place)
    assert np.linalg.norm(locate_tips(moved)) < 0.95
    assert np.allclose(np.linalg.norm(locate_elbows(moved)), 0.5)
    assert (moved[:, 1] >= 0) == (joints[:, 1] >= 0) or abs(moved[0, 1]) < 1e-9


def test_what_the_cameras_see() -> None:
    scenes = Scenes(np.array([[0.5, 1.0]]), np.array([[[-0.5, -0.5], [0.5, -0.5], [-0.5, 0.5]]]), np.array([2]))
    observations = observe(scenes)
    assert observations.instructions == ["touch blue"]
    # a row down is y, a column to the right x
    assert observations.scene[0, 16, 16].tolist() == [220, 50, 50]
    assert observations.scene[0, 16, 48].tolist() == [50, 200, 70]
    assert observations.scene[0, 48, 16].tolist() == [60, 90, 230]
    # the tip is in the middle of what the camera at the tip sees
    assert observations.wrist[0, 16, 16].tolist() == [250, 170, 0]
    assert np.allclose(observations.state[0, :2], locate_tips(scenes.joints), atol=1e-6)


def test_an_episode_ends_at_the_touch() -> None:
    episodes = run_episodes(SCENES, plan_as_expert)
    assert episodes.touched.all()
    last = locate_tips(episodes.joints[:, -1])
    assert (np.linalg.norm(last - SCENES.goals, axis=-1) < DISC_RADIUS).all()
    num_chunks = np.isfinite(episodes.actions).all((2, 3)).sum(1)
    assert (num_chunks == -(-count_actions(episodes) // STEPS)).all()
    still = run_episodes(SCENES, lambda scenes: np.zeros((len(scenes.joints), STEPS, 2)))
    assert not still.touched.any()


def test_the_recordings_show_how_a_miss_is_mended() -> None:
    demonstrations = demonstrate(200, seed=0)
    scenes = demonstrations.scenes
    distances = np.linalg.norm(locate_tips(scenes.joints) - scenes.goals, axis=-1)
    assert ((distances > DISC_RADIUS) & (distances < 3 * DISC_RADIUS)).mean() > 0.2
    # an arm that rests tells nothing: an episode ends at the touch
    assert np.abs(demonstrations.actions).max((1, 2)).min() > 1e-3


def test_the_answers_to_learn_are_the_actions_of_the_expert() -> None:
    processor = make_processor()
    demonstrations = demonstrate(12, seed=0)
    rows = prepare(processor, demonstrations)
    output = processor.plan.outputs["chunk"]
    for actions, ids, labels in zip(demonstrations.actions, rows["input_ids"], rows["labels"], strict=True):
        assert ids[-16:].tolist() == labels[-16:].tolist()
        assert (labels[:-16] == -100).all()
        # half a bin; 32 edges have 31 bins
        assert np.abs(output.decode(labels[-16:]) - actions).max() <= MAX_DELTA / 31 + 1e-12


def test_the_checkpoint_in_transformers_touches_the_discs() -> None:
    """A tenth of the scenes of one seed; at night all of them, by openpi's client as well."""
    episodes = run_episodes(SCENES, load_planner(CHECKPOINT))
    assert episodes.touched.mean() >= 0.9
    # with another instruction it goes elsewhere
    others = SCENES._replace(targets=(SCENES.targets + 1) % 3)
    actions = load_planner(CHECKPOINT)(others)
    assert (np.abs(actions - episodes.actions[:, 0]).max((1, 2)) > MAX_DELTA / 4).mean() > 0.9


def test_the_film_shows_the_arms_until_the_last_touches(tmp_path: Path) -> None:
    episodes = run_episodes(SCENES, plan_as_expert)
    chosen = choose_scenes(SCENES, episodes)
    assert SCENES.targets[chosen].tolist() == [0, 1, 2]
    write_film(tmp_path / "film.gif", SCENES.select(chosen), episodes.select(chosen))
    with Image.open(tmp_path / "film.gif") as film:
        assert film.n_frames <= count_actions(episodes)[chosen].max() + 1
        assert film.n_frames > 5


def test_the_page_has_the_table_and_the_film_of_the_run() -> None:
    page = (ROOT / "docs" / "how-to" / "robots.md").read_text()
    assert write_table(RESULTS) in page
    assert write_line(RESULTS) in page.replace("\n", " ")
    assert (ROOT / "docs" / "images" / "robot.gif").stat().st_size < 400_000


def test_the_stored_run_is_as_good_as_it_has_to_be() -> None:
    num_scenes = sum(result.scenes for result in RESULTS)
    assert num_scenes == 900
    assert sum(result.policy for result in RESULTS) >= 0.97 * num_scenes
    assert sum(result.equal for result in RESULTS) == num_scenes


def test_the_page_says_how_the_dreams_ended() -> None:
    report = json.loads((ROOT / "docs" / "data" / "dream.json").read_text())
    page = (ROOT / "docs" / "how-to" / "robots.md").read_text()
    assert write_lines(report) in page


def test_places_are_within_half_a_square_of_what_they_stand_for() -> None:
    places = encode_places(SCENES)
    decoded = decode_places(places, SCENES.targets)
    assert np.abs(decoded.discs - SCENES.discs).max() <= 1 / NUM_PLACES + 1e-12
    # an arm that is stretched as far as it reaches may be bent to the other side
    assert np.linalg.norm(locate_tips(decoded.joints) - locate_tips(SCENES.joints), axis=-1).max() < 2 / NUM_PLACES
    assert (places[:, -1] == (SCENES.joints[:, 1] >= 0)).all()


def test_an_episode_of_the_environment_ends_at_the_disc() -> None:
    env = ReacherEnv(TrueWorld())
    observation, info = env.reset(seed=2001)
    assert env.observation_space.contains(observation)
    touched = False
    while not touched:
        (actions,) = plan_as_expert(info["scene"])
        assert env.action_space.contains(actions)
        observation, reward, touched, truncated, info = env.step(actions)
        assert not truncated or touched
    assert reward == 1.0
