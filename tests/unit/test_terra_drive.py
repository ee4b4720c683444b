"""Terra on camera frames: the recorded drives, the image tokenizer, the windows of the training, the figures."""

from pathlib import Path

import numpy as np
import pytest
import torch

from examples.terra.drive import CHECKPOINT
from examples.terra.drive.data import Tokens
from examples.terra.drive.drives import (
    CONTEXT_FRAMES,
    FRAME_PIXELS,
    FRAME_SECONDS,
    HELD_OUT,
    METRES_NEAR,
    NUM_FRAMES,
    Drive,
    load,
)
from examples.terra.drive.metrics import ego_distance, ego_place, psnr
from examples.terra.drive.tokenizer import PUBLISHED, SMALL, Tokenizer, TokenizerConfig
from examples.terra.page import steering
from examples.terra.worlds import DriveWorld


@pytest.fixture(scope="module")
def drives() -> list[Drive]:
    return load(HELD_OUT)


def test_held_out_drives_show_the_ego_vehicle_where_its_waypoints_lead(drives: list[Drive]) -> None:
    assert len(drives) >= 20
    for drive in drives:
        assert drive.frames.shape == (NUM_FRAMES, FRAME_PIXELS, FRAME_PIXELS, 3)
        assert np.allclose(drive.actions[:, :, 2], drive.actions[0, :, 2])
        distances = [ego_distance(frame, place) for frame, place in zip(drive.frames, drive.places, strict=True)]
        assert max(distances) <= METRES_NEAR / 2


def test_a_frame_without_the_ego_vehicle() -> None:
    grey = np.full((FRAME_PIXELS, FRAME_PIXELS, 3), 100, np.uint8)
    assert (ego_place(grey), ego_distance(grey, np.zeros(2)), psnr(grey, grey)) == (None, np.inf, np.inf)
    assert psnr(grey, grey + 10) == pytest.approx(20 * np.log10(255 / 10))


@pytest.mark.parametrize("config", [SMALL, PUBLISHED])
def test_an_id_is_that_of_its_own_patch(config: TokenizerConfig) -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer(config).eval()
    frames = torch.randint(0, 256, (1, config.height, config.width, 3), dtype=torch.uint8)
    ids = tokenizer.encode(frames)
    assert ids.shape == (1, config.rows * config.cols)
    assert 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size
    assert tokenizer.decode(ids).shape == frames.shape
    patch = config.height // config.rows
    frames[:, patch : 2 * patch, :patch] = 255 - frames[:, patch : 2 * patch, :patch]
    (changed,) = (tokenizer.encode(frames)[0] != ids[0]).nonzero(as_tuple=True)
    assert set(changed.tolist()) <= {config.cols}


def test_every_id_has_a_code_of_its_own() -> None:
    tokenizer = Tokenizer(SMALL)
    ids = torch.arange(SMALL.vocab_size)
    codes = ids[:, None] // tokenizer.strides % tokenizer.levels
    assert len(codes.unique(dim=0)) == SMALL.vocab_size
    assert torch.equal((codes * tokenizer.strides).sum(1), ids)
    # whole numbers stay, and the ends can be reached
    far = torch.full((1, len(SMALL.levels), 1, 1), 50.0)
    assert torch.equal(tokenizer.quantize(far).flatten(), tokenizer.levels - 1.0)
    assert torch.equal(tokenizer.quantize(-far).flatten(), torch.zeros(len(SMALL.levels)))


def test_a_saved_tokenizer_comes_back(tmp_path: Path, drives: list[Drive]) -> None:
    tokenizer = Tokenizer(SMALL).half().float()  # as the file has it
    tokenizer.save(tmp_path)
    frames = torch.from_numpy(drives[0].frames[:2])
    assert torch.equal(Tokenizer.load(tmp_path).encode(frames), tokenizer.encode(frames))
    sentence = r"^image tokenizer: expected image_tokenizer/config\.json in the checkpoint's folder"
    with pytest.raises(ValueError, match=sentence):
        DriveWorld(tmp_path / "elsewhere")


def test_windows_keep_actions_beside_their_frames() -> None:
    steps = torch.arange(3 * NUM_FRAMES).view(3, NUM_FRAMES, 1)
    tokens = Tokens(steps.to(torch.int16), steps[:, :-1, :, None].float())
    frames, actions, moments = tokens.windows(np.random.default_rng(0), 200, CONTEXT_FRAMES + 1)
    assert torch.equal(frames[:, :-1, 0].float(), actions[:, :, 0, 0])
    assert torch.equal(frames[:, 1:], frames[:, :-1] + 1)
    assert set(moments.flatten().tolist()) == set(range(NUM_FRAMES - CONTEXT_FRAMES))


def test_the_page_steers_on_from_where_the_vehicle_is(drives: list[Drive]) -> None:
    world = DriveWorld(CHECKPOINT)
    wheels = steering(world, world.episode(0))
    assert wheels["kind"] == "wheels"
    assert np.allclose([wheels["x"], wheels["y"]], drives[0].places[CONTEXT_FRAMES])
    travelled = drives[0].places[CONTEXT_FRAMES] - drives[0].places[CONTEXT_FRAMES - 1]
    assert wheels["speed"] == pytest.approx(np.linalg.norm(travelled) / FRAME_SECONDS, rel=0.1)
    assert abs(np.arctan2(*travelled[::-1]) - wheels["heading"]) < 0.3
