"""The comparison of two versions of vLLM, on made-up ones."""

from pathlib import Path

import pytest

from tools import api_diff

OLD = """
class BaseProcessingInfo:
    @property
    def data_parser(self): ...
    def _gone(self, prompt): ...
    def kept(self, items: dict) -> "list[int]": ...
class Unknown:
    def _gone(self): ...
"""
NEW = """
from abc import abstractmethod
class BaseProcessingInfo:
    def data_parser(self): ...
    @abstractmethod
    def must(self, *, plan): ...
    def kept(self, items: "dict") -> list[str]: ...
"""


def tree(folder: Path, name: str, text: str) -> str:
    package = folder / "vllm" / "multimodal"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py"):
        path.touch()
    (package / name).write_text(text)
    return str(folder)


def test_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tree(tmp_path / "old", "processing.py", OLD)
    new = tree(tmp_path / "new", "base.py", NEW)
    with pytest.raises(SystemExit, match="1"):
        api_diff.main(old, new)
    assert set(capsys.readouterr().out.splitlines()[2:]) == {
        "-BaseProcessingInfo: vllm.multimodal.processing",
        "+BaseProcessingInfo: vllm.multimodal.base",
        "-BaseProcessingInfo._gone(self, prompt)",
        "+BaseProcessingInfo.must(self, *, plan) abstractmethod",
        "-BaseProcessingInfo.data_parser property",
        "+BaseProcessingInfo.data_parser(self)",
    }
    with pytest.raises(SystemExit, match="0"):
        api_diff.main(old, old)
