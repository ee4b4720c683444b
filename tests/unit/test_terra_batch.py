"""Batch inference of Terra: which files are read, and which are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from examples.terra import CHECKPOINT, batch
from examples.terra.configuration import LlamaActionConfig
from examples.terra.spec import TERRA
from examples.terra.world import make_episode
from mmkit import InputError

FRAMES = 2
EPISODE = make_episode(0)
CONTEXT, ACTIONS = EPISODE.frames[:3], EPISODE.actions


def changed(array: np.ndarray, value: float) -> np.ndarray:
    """Another first element."""
    copy = array.copy()
    copy.flat[0] = value
    return copy


@pytest.fixture(scope="module")
def config() -> Any:
    return LlamaActionConfig.from_pretrained(CHECKPOINT)


def read(path: Path, config: Any) -> tuple[np.ndarray, np.ndarray]:
    return batch.read_episode(path, TERRA.bind(config), config, FRAMES)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_reads_an_episode(tmp_path: Path, config: Any, dtype: str) -> None:
    batch.write(tmp_path / "e.safetensors", {"context": CONTEXT.astype(dtype), "actions": ACTIONS})
    context, actions = read(tmp_path / "e.safetensors", config)
    assert context.dtype == np.int64
    assert np.array_equal(context, CONTEXT)
    assert np.array_equal(actions, ACTIONS[:4])


LENGTHS = ", context: expected 1 to 23 frames, as the model holds 25 with the 2 to generate, got "
REFUSED = [
    ("actions", None, ": expected the tensors context and actions, got no actions."),
    ("context", CONTEXT.astype("float32"), ", context: expected dtype I64 or I32 or I16 or I8 or U8, got F32."),
    ("actions", ACTIONS.astype("float64"), ", actions: expected dtype F32, got F64."),
    ("actions", ACTIONS[:, :5], ", actions: expected shape (frames, 6, 3), got (24, 5, 3)."),
    ("actions", ACTIONS[0], ", actions: expected shape (frames, 6, 3), got (6, 3)."),
    ("context", CONTEXT[:, :9], ", context: expected shape (context frames, 64), got (3, 9)."),
    ("actions", ACTIONS[:3], ", actions: expected 4 or more, one after every frame but the last, got 3."),
    ("context", EPISODE.frames[:24], LENGTHS + "24."),
    ("context", CONTEXT[:0], LENGTHS + "0."),
    ("actions", changed(ACTIONS, np.nan), ": terra.actions[0]: expected finite values of magnitude <= 1000, got nan"),
    ("context", changed(CONTEXT, 99), ": terra.prompt[0]: expected a token id from 0 to 31, got 99."),
    ("context", changed(CONTEXT, 31), ": terra.actions: expected 4 placeholder(s) [31] * 6 in the prompt for 4 items,"),
]


@pytest.mark.parametrize(("name", "tensor", "sentence"), REFUSED)
def test_refuses_in_one_sentence(
    tmp_path: Path, config: Any, name: str, tensor: np.ndarray | None, sentence: str
) -> None:
    tensors = {"context": CONTEXT, "actions": ACTIONS, name: tensor}
    batch.write(tmp_path / "e.safetensors", {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(InputError) as refusal:
        read(tmp_path / "e.safetensors", config)
    assert str(refusal.value).startswith(f"e.safetensors{sentence}")
    assert "\n" not in str(refusal.value)


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


def test_refuses_what_cannot_run(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(batch.main)

    def run(*options: str) -> Any:
        return CliRunner().invoke(app, ["--no-ray", str(tmp_path), str(tmp_path / "out"), *options])

    assert "got none" in run().output
    batch.write_episodes(tmp_path, range(1))
    result = run("--num-engines", "2")
    assert result.exit_code == 2
    assert "--num-engines" in result.output
