"""The comparison of two versions of vLLM, on made-up ones and on the installed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from mmkit.vllm_api import diff
from mmkit.vllm_api.diff import Tree, Uses, compare

PROCESSING = "multimodal/processing.py"
OLD = """
@dataclass
class ProcessorInputs:
    prompt: "list[int]"
    cache: object = None

class BaseProcessingInfo:
    limits = 1
    @property
    def data_parser(self): ...

class BaseMultiModalProcessor(ABC, Generic[_I]):
    def _main(self, prompt, *, early=False): ...
    def _fields(self, inputs: dict, kwargs: dict) -> dict: ...
    def _updates(self, items: dict) -> "list[int]": ...
    def helper(self, a, b=1): ...
"""
NEW = """
@dataclass
class ProcessorInputs:
    prompt: "list[int]"
    cache: object

class Limited:
    limits = 1

class BaseProcessingInfo(Limited):
    def data_parser(self): ...

class BaseMultiModalProcessor(ABC, Generic[_I]):
    @abstractmethod
    def must(self): ...
    def _new_hook(self): ...
    def _main(self, prompt, *, plan): ...
    def _field_configs(self, inputs: dict, kwargs: dict) -> dict: ...
    def _updates(self, items: "dict") -> list[str]: ...
    def helper(self, a, b=2): ...
"""
USED = Uses(
    overrides=frozenset({"_main", "_fields", "_updates", "_new_hook"}),
    mentions=frozenset({"data_parser", "helper"}),
    imports=frozenset({("vllm.multimodal.processing", "ProcessorInputs"), ("vllm.utils", "merge")}),
)


def tree(folder: Path, files: dict[str, str]) -> Tree:
    for name, text in {"_version.py": "version = '1.0'", **files}.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(str(folder))


@pytest.mark.parametrize(("init", "concern"), [("from .base import ProcessorInputs", ""), ("", "uses")])
def test_changes(init: str, concern: str, tmp_path: Path) -> None:
    """Names are followed where they move, which concerns mmkit only if one of its imports breaks."""
    old = tree(tmp_path / "old", {PROCESSING: OLD, "utils.py": "def merge(rows, mask): ..."})
    package = {"multimodal/processing/__init__.py": init, "multimodal/processing/base.py": NEW}
    new = tree(tmp_path / "new", {**package, "somewhere/else_.py": "def merge(rows, mask, out): ..."})
    place = "vllm.multimodal.processing"
    assert compare(old, old, USED) == []
    assert {f"{c.what} {c.where}: {c.before} to {c.after} [{c.mmkit}]" for c in compare(old, new, USED)} == {
        "removed BaseMultiModalProcessor._fields: (inputs, kwargs) to perhaps _field_configs now [overrides]",
        "added BaseMultiModalProcessor._field_configs:  to (inputs, kwargs) []",
        "added BaseMultiModalProcessor._new_hook:  to () [overrides]",
        "added BaseMultiModalProcessor.must:  to abstract method () [must override]",
        "signature BaseMultiModalProcessor._main: (prompt, *, early=False) to (prompt, *, plan) [overrides]",
        "types BaseMultiModalProcessor._updates: (items: dict) -> list[int] to (items: dict) -> list[str] [overrides]",
        "default BaseMultiModalProcessor.helper: (a, b=1) to (a, b=2) [uses]",
        "kind BaseProcessingInfo.data_parser: property to () [uses]",
        "signature ProcessorInputs.__init__: fields (prompt, cache=None) to fields (prompt, cache) [uses]",
        "signature merge: (rows, mask) to (rows, mask, out) [uses]",
        "moved merge: vllm.utils to vllm.somewhere.else_ [uses]",
        f"moved ProcessorInputs: {place} to {place}.base [{concern}]",
        *(f"moved {name}: {place} to {place}.base []" for name in ("BaseMultiModalProcessor", "BaseProcessingInfo")),
    }


def test_as_a_script_where_no_vllm_runs(tmp_path: Path) -> None:
    """With nothing but the standard library."""
    tree(tmp_path / "old", {PROCESSING: OLD})
    tree(tmp_path / "new", {PROCESSING: OLD.replace("ProcessorInputs", "Inputs")})
    command = [sys.executable, "-I", "-S", diff.__file__, str(tmp_path / "old")]
    for name, status, printed in (
        ("old", 0, "vLLM 1.0 to 1.0: 0 change"),
        ("new", 1, "removed   ProcessorInputs  [uses]"),
        ("nowhere", 2, "expected a folder that holds vllm/, got none"),
    ):
        done = subprocess.run([*command, str(tmp_path / name)], capture_output=True, text=True)
        assert done.returncode == status
        assert printed in done.stdout + done.stderr


def test_the_installed_version() -> None:
    """Its surface is found, whether an import works, and what mmkit uses of it."""
    here, used = Tree("installed"), diff.uses()
    assert here.version.partition("+")[0] == vllm.__version__.partition("+")[0]
    assert {"BaseMultiModalProcessor", "PromptUpdateDetails", "TokenizeParams"} <= {*here.definitions}
    assert here.has("vllm.multimodal.processing", "BaseMultiModalProcessor")  # from one of its modules
    assert here.has("vllm", "ModelRegistry")  # by __getattr__
    assert not here.has("vllm", "NoSuchName")
    assert not here.has("vllm.no_such_module", "ModelRegistry")
    assert {"_get_prompt_updates", "_get_mm_fields_config", "embed_multimodal"} <= used.overrides
    assert ("vllm.multimodal.inputs", "MultiModalFieldConfig") in used.imports
    assert "get_merged_mm_kwargs" in used.mentions
