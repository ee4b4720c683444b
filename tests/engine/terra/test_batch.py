"""Batch inference: runs that go on where they were, files that are refused, the ids of the engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from safetensors.numpy import load_file
from typer.testing import CliRunner

from examples.terra import batch
from examples.terra.world import make_episode

from .rollouts import generate

FRAMES = 2


class Recorded(batch.Rollouts):
    """Notes which episodes an engine takes at once."""

    batches: list[list[str]]

    def __call__(self, files: dict[str, np.ndarray]) -> dict[str, Any]:
        Recorded.batches.append([Path(path).stem for path in files["path"]])
        return super().__call__(files)


@pytest.fixture
def batches(terra: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of all runs, which have the engine of this folder in place of one of their own."""
    monkeypatch.setattr("examples.terra.rollout.VllmTerra", lambda model: terra)
    monkeypatch.setattr(batch, "Rollouts", Recorded)
    Recorded.batches = []
    return Recorded.batches


def run(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(batch.main)
    return CliRunner().invoke(app, [str(argument) for argument in ("--no-ray", "--frames", FRAMES, *arguments)])


def test_goes_on_where_it_was(tmp_path: Path, batches: list[list[str]]) -> None:
    episodes, out = tmp_path / "episodes", tmp_path / "out"
    result = run(episodes, out, "--make-episodes", 5, "--batch-size", 2)
    assert result.exit_code == 0, result.output
    assert batches == [["episode_0000", "episode_0001"], ["episode_0002", "episode_0003"], ["episode_0004"]]

    (out / "episode_0001.safetensors").unlink()
    (out / "episode_0003.safetensors").write_text("not whole")
    batches.clear()
    assert run(episodes, out).exit_code == 0
    assert batches == [["episode_0001", "episode_0003"]]

    batches.clear()
    assert "5 written before" in run(episodes, out).output
    assert not batches  # nothing to do

    assert run(episodes, out, "--frames", FRAMES + 1).exit_code == 0
    assert len(batches[0]) == 5  # of another length


def test_ids_are_those_of_the_engine(terra: Any, tmp_path: Path, batches: list[list[str]]) -> None:
    """Also of an episode with a shorter context; bad files do not stop the others."""
    episodes, out = tmp_path / "episodes", tmp_path / "out"
    batch.write_episodes(episodes, range(3))
    episode = make_episode(3)
    batch.write(
        episodes / "short.safetensors", {"context": episode.frames[:2].astype("int32"), "actions": episode.actions}
    )
    actions = np.full_like(episode.actions, np.nan)
    batch.write(episodes / "nan.safetensors", {"context": episode.frames[:3], "actions": actions})
    (episodes / "text.safetensors").write_text("no")

    result = run(episodes, out)
    assert result.exit_code == 1
    assert f"4 written to {out}, 2 refused" in result.output
    assert "nan.safetensors: terra.actions[0]: expected finite values" in result.output
    assert "text.safetensors: expected a safetensors file" in result.output
    written = {path.name: load_file(path)["tokens"] for path in out.iterdir()}
    assert written.keys() == {path.name for path in episodes.iterdir()} - {"nan.safetensors", "text.safetensors"}
    for name, tokens in written.items():
        tensors = load_file(episodes / name)
        assert np.array_equal(tokens[None], generate(terra, tensors["context"][None], tensors["actions"][None], FRAMES))
