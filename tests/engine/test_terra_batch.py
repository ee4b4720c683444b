"""Batch inference of Terra: files that are refused, runs that go on where they were, the ids of the engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from safetensors.numpy import load_file
from transformers import AutoConfig
from typer.testing import CliRunner

from examples.terra import CHECKPOINT, batch, register
from examples.terra.spec import TERRA
from examples.terra.world import make_episode
from mmkit import InputError

FRAMES = 2
EPISODE = make_episode(0)
CONTEXT, ACTIONS = EPISODE.frames[:3], EPISODE.actions


def changed(array: np.ndarray, index: tuple[int, ...], value: float) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config() -> Any:
    register()
    return AutoConfig.from_pretrained(CHECKPOINT)


def read(path: Path, config: Any) -> tuple[np.ndarray, np.ndarray]:
    return batch.read_episode(path, TERRA.bind(config), config, FRAMES)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_reads_an_episode(tmp_path: Path, config: Any, dtype: str) -> None:
    batch.write(tmp_path / "e.safetensors", {"context": CONTEXT.astype(dtype), "actions": ACTIONS})
    context, actions = read(tmp_path / "e.safetensors", config)
    assert context.dtype == np.int64
    assert np.array_equal(context, CONTEXT)
    assert np.array_equal(actions, ACTIONS[:4])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"actions": None}, "e.safetensors: expected the tensors context and actions, got no actions."),
        (
            {"context": CONTEXT.astype("float32")},
            "e.safetensors, context: expected dtype I64 or I32 or I16 or I8 or U8, got F32.",
        ),
        ({"actions": ACTIONS.astype("float64")}, "e.safetensors, actions: expected dtype F32, got F64."),
        ({"actions": ACTIONS[:, :5]}, "e.safetensors, actions: expected shape (frames, 6, 3), got (24, 5, 3)."),
        ({"actions": ACTIONS[0]}, "e.safetensors, actions: expected shape (frames, 6, 3), got (6, 3)."),
        ({"context": CONTEXT[:, :9]}, "e.safetensors, context: expected shape (context frames, 64), got (3, 9)."),
        (
            {"actions": ACTIONS[:3]},
            "e.safetensors, actions: expected 4 or more, one after every frame but the last, got 3.",
        ),
        (
            {"context": EPISODE.frames[:24]},
            "e.safetensors, context: expected 1 to 23 frames, as the model holds 25 with the 2 to generate, got 24.",
        ),
        (
            {"context": CONTEXT[:0]},
            "e.safetensors, context: expected 1 to 23 frames, as the model holds 25 with the 2 to generate, got 0.",
        ),
        (
            {"actions": changed(ACTIONS, (1, 0, 0), np.nan)},
            "e.safetensors: terra.actions[1]: expected finite values of magnitude <= 1000, got nan at [0, 0].",
        ),
        (
            {"context": changed(CONTEXT, (0, 5), 99)},
            "e.safetensors: terra.prompt[5]: expected a token id from 0 to 31, got 99. Check the tokenizer.",
        ),
        (
            {"context": changed(CONTEXT, (0, 5), 31)},  # the placeholder
            "e.safetensors: terra.actions: expected 4 placeholder(s) [31] * 6 in the prompt for 4 items, got 4, and 25 "
            "placeholder id(s) in all. Write one placeholder per item, and nothing else with its id.",
        ),
    ],
)
def test_refuses_in_one_sentence(
    tmp_path: Path, config: Any, changes: dict[str, np.ndarray | None], sentence: str
) -> None:
    tensors = {"context": CONTEXT, "actions": ACTIONS, **changes}
    batch.write(tmp_path / "e.safetensors", {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(InputError) as refusal:
        read(tmp_path / "e.safetensors", config)
    assert str(refusal.value) == sentence


def test_refuses_what_is_no_safetensors_file(tmp_path: Path, config: Any) -> None:
    (tmp_path / "e.safetensors").write_text("no")
    for name in ("e.safetensors", "missing.safetensors"):
        with pytest.raises(InputError, match=rf"^{name}: expected a safetensors file, got [^\n]*$"):
            read(tmp_path / name, config)


def test_outputs_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(tensors: Any, path: Path) -> None:
        path.write_text("half")
        raise OSError("no space left on device")

    monkeypatch.setattr(batch, "save_file", half)
    with pytest.raises(OSError, match="no space"):
        batch.write(tmp_path / "e.safetensors", {"tokens": CONTEXT})
    assert not list(tmp_path.glob("*.safetensors"))
    assert not batch.is_done(tmp_path / "e.safetensors", 3)


# -- running -----------------------------------------------------------------------------------------------------------


class Fake:
    """In place of `Rollouts`, without an engine."""

    made: list["Fake"]

    def __init__(self, model: str, frames: int, out: str) -> None:
        self.frames, self.out = frames, Path(out)
        self.batches: list[list[str]] = []
        Fake.made.append(self)

    def __call__(self, files: dict[str, np.ndarray]) -> dict[str, list[str]]:
        paths = [Path(path) for path in files["path"]]
        self.batches.append([path.stem for path in paths])
        for path in paths:
            if "bad" not in path.name:
                batch.write(self.out / path.name, {"tokens": np.zeros((self.frames, 64), np.int64)})
        return {"path": [*map(str, paths)], "error": ["bad: no." if "bad" in path.name else "" for path in paths]}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.made = []
    monkeypatch.setattr(batch, "Rollouts", Fake)
    return Fake


def run(*args: object) -> Any:
    app = typer.Typer()
    app.command()(batch.main)
    return CliRunner().invoke(app, [str(arg) for arg in ("--no-ray", "--frames", FRAMES, *args)])


def test_goes_on_where_it_was(tmp_path: Path, fake: type[Fake]) -> None:
    episodes, out = tmp_path / "episodes", tmp_path / "out"
    result = run(episodes, out, "--make-episodes", 5, "--batch-size", 2)
    assert result.exit_code == 0, result.output
    assert fake.made[0].batches == [
        ["episode_0000", "episode_0001"],
        ["episode_0002", "episode_0003"],
        ["episode_0004"],
    ]

    (out / "episode_0001.safetensors").unlink()
    (out / "episode_0003.safetensors").write_text("not whole")
    assert run(episodes, out).exit_code == 0
    assert fake.made[1].batches == [["episode_0001", "episode_0003"]]

    assert "5 written before" in run(episodes, out).output
    assert len(fake.made) == 2  # nothing to do, no engine

    assert run(episodes, out, "--frames", FRAMES + 1).exit_code == 0
    assert len(fake.made[2].batches[0]) == 5  # of another length


def test_a_bad_file_does_not_stop_the_others(tmp_path: Path, fake: type[Fake]) -> None:
    batch.write_episodes(tmp_path, range(3))
    (tmp_path / "bad.safetensors").write_text("no")
    result = run(tmp_path, tmp_path / "out")
    assert result.exit_code == 1
    assert "3 written to" in result.output
    assert ", 1 refused" in result.output
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_refuses_what_cannot_run(tmp_path: Path, fake: type[Fake]) -> None:
    assert "got none" in run(tmp_path, tmp_path / "out").output
    batch.write_episodes(tmp_path, range(1))
    result = run(tmp_path, tmp_path / "out", "--num-engines", 2)
    assert result.exit_code == 2
    assert "--num-engines" in result.output
    assert not fake.made


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[batch.Rollouts]:
    """An engine for the whole module."""
    with pytest.MonkeyPatch.context() as env:
        env.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        made = batch.Rollouts(str(CHECKPOINT), FRAMES, str(tmp_path_factory.mktemp("out")))
        yield made
        made.engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three episodes, one with a shorter context, and two files that are refused."""
    directory = tmp_path_factory.mktemp("episodes")
    batch.write_episodes(directory, range(3))
    batch.write(directory / "short.safetensors", {"context": CONTEXT[:2].astype("int32"), "actions": ACTIONS})
    batch.write(directory / "nan.safetensors", {"context": CONTEXT, "actions": changed(ACTIONS, (0, 0, 0), np.nan)})
    (directory / "text.safetensors").write_text("no")
    return sorted(directory.iterdir())


def direct(rollouts: batch.Rollouts, path: Path) -> np.ndarray:
    """What the engine generates for one episode alone."""
    tensors = load_file(path)
    steps = rollouts.engine.rollout(tensors["context"][None], tensors["actions"][None], FRAMES)
    return np.stack([step.tokens[0] for step in steps])


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_ids_are_those_of_the_engine(rollouts: batch.Rollouts, episodes: list[Path]) -> None:
    report = rollouts({"path": np.array([*map(str, episodes)])})
    refused = {Path(p).stem for p, error in zip(report["path"], report["error"], strict=True) if error}
    assert refused == {"nan", "text"}
    for path in episodes:
        written = rollouts.out / path.name
        assert batch.is_done(written, FRAMES) == (path.stem not in refused)
        if path.stem not in refused:
            assert np.array_equal(load_file(written)["tokens"], direct(rollouts, path))


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_ids_are_the_same_with_ray(
    rollouts: batch.Rollouts, episodes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.data")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    options = {"model": str(CHECKPOINT), "frames": FRAMES, "out": str(tmp_path)}
    reports = list(batch.run_ray(episodes, 2, 1, options))
    refused = {Path(report["path"]).stem for report in reports if report["error"]}
    assert refused == {"nan", "text"}
    assert {Path(report["path"]) for report in reports} == set(episodes)
    for path in episodes:
        if path.stem not in refused:
            assert np.array_equal(load_file(tmp_path / path.name)["tokens"], direct(rollouts, path))
