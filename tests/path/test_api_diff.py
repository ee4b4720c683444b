"""The comparison of two versions of vLLM, on made-up ones and on a part of the installed one."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import api_diff

PROCESSING = "multimodal/processing.py"
OLD = """
from dataclasses import dataclass
@dataclass
class ProcessorInputs:
    prompt: "list[int]"
    cache: object = None
class BaseProcessingInfo:
    @property
    def data_parser(self): ...
class BaseMultiModalProcessor:
    def _gone(self, prompt): ...
    def _call_hf_processor(self, prompt, *, early=False): ...
    def _get_prompt_updates(self, items: dict) -> "list[int]": ...
"""
NEW = """
from abc import abstractmethod
from dataclasses import dataclass
@dataclass
class ProcessorInputs:
    prompt: "list[int]"
    cache: object
class BaseProcessingInfo:
    def data_parser(self): ...
class BaseMultiModalProcessor:
    @abstractmethod
    def must(self): ...
    def _call_hf_processor(self, prompt, *, plan): ...
    def _get_prompt_updates(self, items: "dict") -> list[str]: ...
"""


def tree(folder: Path, files: dict[str, str]) -> str:
    for name, text in {"__init__.py": "", "multimodal/__init__.py": "", **files}.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def test_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are followed where they move; what mmkit names comes first."""
    engine = {"engine/__init__.py": "", "engine/arg_utils.py": "class EngineArgs: ..."}
    package = {"multimodal/processing/__init__.py": "from .base import *"}
    moved = {**package, "multimodal/processing/base.py": NEW, "arguments.py": "class EngineArgs: ..."}
    one = tree(tmp_path / "one", {PROCESSING: OLD, **engine})
    other = tree(tmp_path / "other", moved)
    old, new = api_diff.read(one), api_diff.read(other)
    assert api_diff.compare(old, old) == []
    changes = api_diff.compare(old, new)
    here = "vllm.multimodal.processing"
    assert {f"{c.what} {c.where}: {c.before} to {c.after}" for c in changes} == {
        "removed BaseMultiModalProcessor._gone: (prompt) to ",
        "added BaseMultiModalProcessor.must:  to abstractmethod ()",
        "changed BaseMultiModalProcessor._call_hf_processor: (prompt, *, early=False) to (prompt, *, plan)",
        "types BaseMultiModalProcessor._get_prompt_updates: (items: dict) -> list[int] to (items: dict) -> list[str]",
        "changed BaseProcessingInfo.data_parser: property attribute to ()",
        "changed ProcessorInputs.__init__: (prompt, cache=None) to (prompt, cache)",
        "moved EngineArgs: vllm.engine.arg_utils to vllm.arguments",
        *(
            f"moved {name}: {here} to {here}.base"
            for name in ("BaseMultiModalProcessor", "BaseProcessingInfo", "ProcessorInputs")
        ),
    }
    named = [bool(api_diff.named_in(change.where)) for change in changes]
    assert named == sorted(named, reverse=True)
    assert api_diff.named_in("BaseMultiModalProcessor._get_prompt_updates")
    assert not api_diff.named_in("BaseMultiModalProcessor._gone")
    assert api_diff.main([one, one]) == 0
    assert api_diff.main([one, other]) == 1
    assert "moved EngineArgs  [testing/vllm_model.py]\n  - vllm.engine" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        api_diff.main([one, str(tmp_path)])
    assert "expected a folder that holds vllm/, or a version that _releases in" in capsys.readouterr().err


def test_of_a_long_signature_the_parameters_that_differ_are_shown() -> None:
    many = ", ".join(f"option_{i}=None" for i in range(50))
    before, after = api_diff.shown(f"({many}, last=1)", f"(first, {many}, last=1)")
    assert (before, after) == ("(option_0=None, ...", "(first, option_0=None, ...")


def test_the_installed_version(tmp_path: Path) -> None:
    """Its surface is there, with the hooks that mmkit overrides; of the rest of vLLM nothing is read here."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    for home in api_diff.HOMES:
        parts = Path(*home.split("."))
        target, source = tmp_path / parts, Path(spec.origin).parents[1] / parts
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source.with_suffix(".py"), target.with_suffix(".py"))
        for folder in (tmp_path / part for part in parts.parents if part.parts):
            (folder / "__init__.py").touch()
    surface = api_diff.read(str(tmp_path))
    assert {"MultiModalFieldConfig", "PromptUpdateDetails", "TokenizeParams", "SupportsMultiModal"} <= {*surface}
    assert surface["BaseMultiModalProcessor._get_prompt_updates"].bare.startswith("abstractmethod (mm_items,")
    assert surface["EncDecMultiModalProcessor._get_mm_fields_config"].owner == "BaseMultiModalProcessor"
    assert {"EngineArgs", "MultiModalFieldConfig", "SupportsMultiModal"} <= api_diff.imported()
