"""The town, its codebook, the windows of the training, the figures of the judge, the steering of the page."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.terra import CHECKPOINT
from examples.terra.drive.data import Tokens, record_tokens
from examples.terra.drive.drives import CONTEXT_FRAMES, FRAME_SECONDS, NUM_FRAMES, Drive
from examples.terra.drive.judge import FIGURES, GENERATED, follow_actions, judge, markdown, shuffle_actions
from examples.terra.drive.metrics import MOST_DB, blobs, hour, mass, persistence, psnr, ssim, town_of, unity, vehicles
from examples.terra.drive.simulator import (
    CELL_PIXELS,
    CELLS,
    COLOURS,
    EAST,
    EGO,
    HOURS,
    LINES,
    WEST,
    Town,
    Vehicle,
    make_action,
    record,
    render,
    vehicles_at,
)
from examples.terra.drive.tokenizer import Tokenizer
from examples.terra.worlds import TownWorld

PAGE = Path(__file__).parents[2] / "docs/data/terra-town.md"


@pytest.fixture(scope="module")
def drives() -> list[Drive]:
    return [record(seed) for seed in range(6)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(CHECKPOINT)


def describe(vehicles: Sequence[Vehicle]) -> set[Any]:
    """Return what a picture shows of vehicles."""
    return {(vehicle.colour, vehicle.place, vehicle.heading) for vehicle in vehicles}


def test_a_frame_shows_every_vehicle_and_all_that_matters_of_it() -> None:
    """No two are in one cell."""
    for seed in range(4):
        town = Town(seed)
        for _ in range(60):
            town.advance()
            picture = town.picture()
            visible = vehicles(picture)
            assert hour(picture) == town.hour
            assert visible[0].colour == EGO
            assert describe(visible) == describe(town.vehicles)
            cells: list[tuple[int, int]] = []
            for vehicle in town.vehicles:
                cells.extend(vehicle.cells)
            assert len(cells) == len(set(cells))


def test_lines_leave_on_the_hour_and_end() -> None:
    ego = Vehicle(EGO, (2, 6), WEST, WEST)
    town = Town(0, [ego])
    stay = make_action([ego])
    colours = []
    for _ in range(4 * HOURS):
        hour_before = town.hour
        colours_before = {vehicle.colour for vehicle in town.vehicles}
        town.follow(stay)
        colours.append({vehicle.colour for vehicle in town.vehicles} - {EGO})
        for colour in colours[-1] - colours_before:
            assert hour_before in LINES[colour].hours
    assert set().union(*colours) == LINES.keys()
    assert colours[-HOURS:] == colours[-2 * HOURS : -HOURS]


def test_other_vehicles_wait_for_the_ego_vehicle_and_none_leaves_into_it() -> None:
    ego = Vehicle(EGO, (0, 6), EAST, EAST)
    (red,) = vehicles_at("red", (0, 10))
    town = Town(0, [ego, red])
    for _ in range(3):
        town.follow(make_action([ego]))
        assert red in town.vehicles
    town.follow(make_action([ego, *ego.path(2)]))
    town.follow(make_action([ego]))
    assert red not in town.vehicles
    before_the_gate = Vehicle(EGO, (0, 4), EAST, EAST)
    town = Town(0, [before_the_gate], min(LINES["red"].hours))
    town.follow(make_action([before_the_gate]))
    assert town.vehicles == [before_the_gate]


def test_a_frame_without_the_ego_vehicle_is_no_town() -> None:
    with pytest.raises(ValueError, match="expected the ego vehicle, got none"):
        town_of(render([]))


def test_an_action_is_ahead_and_to_the_left() -> None:
    corner = Vehicle(EGO, (0, 6), EAST, EAST, 1)
    places = [corner, corner.advance(), corner.advance().advance()]
    assert np.allclose(make_action(places[:2])[-1], [2, 0, FRAME_SECONDS])
    assert np.allclose(make_action(places)[[2, -1], :2], [[2, 0], [2, -2]])
    assert np.allclose(make_action([corner])[:, :2], 0)
    for count in range(3):
        assert corner.follow(make_action(places[: count + 1])) == places[1 : count + 1]


def test_a_small_codebook_has_what_differs_most(drives: list[Drive]) -> None:
    frames = drives[0].frames
    small = Tokenizer.learn(frames, CELL_PIXELS, 4)
    whole = Tokenizer.learn(frames, CELL_PIXELS, 1024)
    assert len(small.codebook) == 4 < len(whole.codebook) < 1024
    assert psnr(small.decode(small.encode(frames), CELLS), frames) < MOST_DB
    assert np.array_equal(whole.decode(whole.encode(frames), CELLS), frames)


def test_a_saved_tokenizer_comes_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path)
    assert np.array_equal(Tokenizer.load(tmp_path).codebook, tokenizer.codebook)
    sentence = r"^image tokenizer: expected image_tokenizer/codebook\.safetensors in the checkpoint's folder"
    with pytest.raises(ValueError, match=sentence):
        TownWorld(tmp_path / "elsewhere")


def test_windows_keep_actions_beside_their_frames() -> None:
    steps = torch.arange(3 * NUM_FRAMES).view(3, NUM_FRAMES, 1)
    tokens = Tokens(steps.to(torch.int16), steps[:, :-1, :, None].float())
    frames, actions, moments = tokens.draw_windows(np.random.default_rng(0), 200, CONTEXT_FRAMES + 1)
    assert torch.equal(frames[:, :-1, 0].float(), actions[:, :, 0, 0])
    assert torch.equal(frames[:, 1:], frames[:, :-1] + 1)
    assert set(moments.flatten().tolist()) == set(range(NUM_FRAMES - CONTEXT_FRAMES))


def test_tokens_are_read_again_only_if_they_are_of_the_same_drives(tmp_path: Path) -> None:
    file = tmp_path / "drives.npz"
    tokens, tokenizer = record_tokens([3, 4], file)
    assert np.array_equal(tokenizer.decode(tokens.frames[0].numpy(), CELLS), record(3).frames)
    time_of_writing = file.stat().st_mtime_ns
    stored_tokens, stored_tokenizer = record_tokens([3, 4], file)
    assert torch.equal(stored_tokens.frames, tokens.frames)
    assert np.array_equal(stored_tokenizer.codebook, tokenizer.codebook)
    assert file.stat().st_mtime_ns == time_of_writing
    assert not torch.equal(record_tokens([5, 6], file)[0].frames, tokens.frames)


def test_the_judge_is_not_gamed(drives: list[Drive]) -> None:
    """Only the truth has all figures: the empty scene wins no vehicle, a frozen video no life, ghosts no mass."""
    drive = drives[0]
    truth = follow_actions(0, drive.actions)
    right = judge(truth, drive)
    assert min(right["persistence"]) == min(right["ego"]) == 100
    assert right["life"] == min(right["mass"]) == max(right["mass"]) == min(right["unity"]) == 1
    assert right["psnr"] == MOST_DB
    empty = judge(np.broadcast_to(render([]), truth.shape), drive)
    assert max(empty["persistence"]) == max(empty["ego"]) == max(empty["mass"]) == empty["life"] == 0
    frozen = judge(np.broadcast_to(drive.frames[CONTEXT_FRAMES - 1], truth.shape), drive)
    assert frozen["life"] == 0
    assert np.mean(frozen["persistence"]) < 60
    ghosts = judge(np.minimum(truth, np.roll(truth, 2 * CELL_PIXELS, axis=1)), drive)
    assert max(ghosts["mass"]) > 1.25


def test_a_vehicle_counts_once_in_its_own_colour(drives: list[Drive]) -> None:
    truth = blobs(drives[0].frames[0])
    ego = [blob for blob in truth if blob.colour == EGO]
    assert persistence(truth, truth) == 1
    assert persistence(ego, truth) == 1 / len(truth)
    assert persistence(ego, [*ego, *ego]) == 0.5
    other_colour = next(colour for colour in COLOURS if colour != EGO)
    in_another_colour = [replace(blob, colour=other_colour) for blob in ego]
    assert persistence(in_another_colour, ego) == 0
    assert persistence([replace(ego[0], area=ego[0].area // 3)], ego) == 0
    assert mass(ego, truth) == pytest.approx(1 / len(truth), rel=0.1)
    assert unity([*ego, *ego], ego) == 0.5


def test_errors_of_pixels(drives: list[Drive]) -> None:
    frames = drives[0].frames[:2]
    grey = np.full_like(frames, 100)
    assert psnr(grey, grey) == MOST_DB
    assert psnr(grey, grey + 10) == pytest.approx(20 * np.log10(255 / 10))
    assert ssim(frames[0], frames[0]) == pytest.approx(1)
    assert ssim(frames[0], grey[0]) < 0.6 < ssim(frames[0], render([])) < 1


def test_the_docs_have_the_figures_of_the_judge() -> None:
    assert markdown(json.loads(FIGURES.read_text())) in PAGE.read_text()


def test_a_shuffle_leads_elsewhere_and_has_the_same_actions(drives: list[Drive]) -> None:
    shares = []
    for seed, drive in enumerate(drives):
        actions = shuffle_actions(drive, seed)
        assert np.array_equal(actions[: CONTEXT_FRAMES - 1], drive.actions[: CONTEXT_FRAMES - 1])
        assert np.array_equal(np.sort(actions, axis=0), np.sort(drive.actions, axis=0))
        frames = follow_actions(seed, actions)
        assert len(frames) == GENERATED
        shares.append(np.mean(judge(frames, drive)["ego"]))
    assert np.mean(shares) < 10


def test_the_page_steers_on_from_where_the_vehicle_is(tokenizer: Tokenizer) -> None:
    world = TownWorld()
    for seed in range(6):
        town = Town(seed)
        for _ in range(CONTEXT_FRAMES):
            town.advance()
        steering = world.steering(world.episode(seed), CONTEXT_FRAMES)
        assert steering["place"] == town.vehicles[0].place
        assert steering["heading"] == town.vehicles[0].heading
        assert steering["empty"] == tokenizer.encode(render([])).tolist()
