"""The comparison of two versions of vLLM, on made-up ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from mmkit.vllm_api import diff
from mmkit.vllm_api.diff import Change, Tree, Uses, compare

OLD = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = version = '1.0'\n",
    "vllm/multimodal/__init__.py": "",
    "vllm/multimodal/processing.py": """
        from dataclasses import dataclass, field

        @dataclass
        class ProcessorInputs:
            prompt: "list[int]"
            cache: object = None

        class BaseProcessingInfo:
            allowed = True

            @property
            def data_parser(self): ...
            def get_limits(self): ...

        class BaseMultiModalProcessor(ABC, Generic[_I]):
            def __init__(self, info): ...
            def _main(self, prompt, items, *, early=False): ...
            def _fields(self, inputs: dict, kwargs: dict) -> dict: ...
            def _updates(self, items) -> "list[int]": ...
            def helper(self, a, b=1): ...
            def __repr__(self): ...

        class EncDecMultiModalProcessor(BaseMultiModalProcessor[_I]): ...
    """,
    "vllm/utils.py": "def merge(rows, mask): ...\n",
}
USED = Uses(
    overrides=frozenset({"_main", "_fields", "_updates", "get_limits", "_new_hook"}),
    mentions=frozenset({"data_parser", "helper"}),
    imports=frozenset(
        {
            ("vllm.multimodal.processing", "BaseMultiModalProcessor"),
            ("vllm.multimodal.processing", "ProcessorInputs"),
            ("vllm.utils", "merge"),
        }
    ),
)
PROCESSING = "vllm/multimodal/processing.py"


def tree(folder: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return Tree(str(folder))


def changed(folder: Path, *edits: tuple[str, str], **files: str) -> list[Change]:
    """What the comparison tells after edits of the processing module and with other files in place of the old ones."""
    processing = OLD[PROCESSING]
    for before, after in edits:
        assert before in processing
        processing = processing.replace(before, after)
    new = tree(folder / "new", {**OLD, PROCESSING: processing, **files})
    return compare(tree(folder / "old", OLD), new, USED)


def test_nothing_changed(tmp_path: Path) -> None:
    assert changed(tmp_path) == []


def test_a_renamed_hook(tmp_path: Path) -> None:
    gone, came = changed(tmp_path, ("_fields", "_field_configs"))
    assert gone == Change(
        "removed",
        "BaseMultiModalProcessor._fields",
        "(inputs, kwargs)",
        "perhaps _field_configs now",
        "overrides",
    )
    assert came == Change("added", "BaseMultiModalProcessor._field_configs", "", "(inputs, kwargs)")


def test_a_removed_hook(tmp_path: Path) -> None:
    (gone,) = changed(tmp_path, ("def get_limits(self): ...", ""))
    assert gone == Change("removed", "BaseProcessingInfo.get_limits", "()", "", "overrides")


def test_a_new_required_argument(tmp_path: Path) -> None:
    (change,) = changed(tmp_path, ("early=False", "early=False, plan"))
    before, after = "(prompt, items, *, early=False)", "(prompt, items, *, early=False, plan)"
    assert change == Change("signature", "BaseMultiModalProcessor._main", before, after, "overrides")


def test_other_defaults_and_types(tmp_path: Path) -> None:
    edits = [("b=1", "b=2"), ('"list[int]": ...', "list[str]: ..."), ("inputs: dict", 'inputs: "dict"')]
    assert changed(tmp_path, *edits) == [
        Change(
            "types", "BaseMultiModalProcessor._updates", "(items) -> list[int]", "(items) -> list[str]", "overrides"
        ),
        Change("default", "BaseMultiModalProcessor.helper", "(a, b=1)", "(a, b=2)", "uses"),
    ]


def test_fields_of_a_dataclass_are_arguments(tmp_path: Path) -> None:
    (change,) = changed(tmp_path, ("cache: object = None", "cache: object"))
    before, after = "fields (prompt, cache=None)", "fields (prompt, cache)"
    assert change == Change("signature", "ProcessorInputs.__init__", before, after, "uses")


def test_new_members(tmp_path: Path) -> None:
    """Those that mmkit must implement, or has by chance, concern it; others do not."""
    hooks = ["@abstractmethod", "def must(self): ...", "def _new_hook(self): ...", "def other(self): ..."]
    added = "\n            ".join(hooks)
    assert changed(tmp_path, ("def __repr__(self): ...", added)) == [
        Change("added", "BaseMultiModalProcessor.must", "", "abstract method ()", "must override"),
        Change("added", "BaseMultiModalProcessor._new_hook", "", "()", "overrides"),
        Change("added", "BaseMultiModalProcessor.other", "", "()"),
    ]


def test_a_property_that_becomes_a_method(tmp_path: Path) -> None:
    (change,) = changed(tmp_path, ("@property\n", "\n"))
    assert change == Change("kind", "BaseProcessingInfo.data_parser", "property", "()", "uses")


def test_a_member_that_moves_to_a_base_class(tmp_path: Path) -> None:
    edits = ("class BaseProcessingInfo:\n            allowed = True", "class Info:\n            allowed = True")
    base = (
        "class BaseMultiModalProcessor(ABC",
        "class BaseProcessingInfo(Info): ...\n\n        class BaseMultiModalProcessor(ABC",
    )
    assert changed(tmp_path, edits, base) == []


def test_a_moved_class(tmp_path: Path) -> None:
    """It concerns mmkit only if an import of mmkit breaks."""
    package = {"vllm/multimodal/processing.py": "", "vllm/multimodal/processing/base.py": OLD[PROCESSING]}
    old = tree(tmp_path / "old", OLD)
    new = tree(tmp_path / "new", {**OLD, **package})
    (new.root / PROCESSING).unlink()
    init = new.root / "vllm/multimodal/processing/__init__.py"
    init.write_text("from .base import BaseMultiModalProcessor, ProcessorInputs\n")
    places = "vllm.multimodal.processing", "vllm.multimodal.processing.base"
    names = "BaseMultiModalProcessor", "BaseProcessingInfo", "EncDecMultiModalProcessor", "ProcessorInputs"
    assert compare(old, new, USED) == [Change("moved", name, *places) for name in names]
    init.write_text("")
    diff._text.cache_clear()
    diff._parsed.cache_clear()
    broken = [change for change in compare(old, Tree(str(new.root)), USED) if change.mmkit]
    assert broken == [Change("moved", name, *places, "uses") for name in (names[0], names[3])]


def test_a_moved_function(tmp_path: Path) -> None:
    """Wherever it goes."""
    files = {"vllm/utils.py": "", "vllm/somewhere/else_.py": "def merge(rows, mask, out): ...\n"}
    assert changed(tmp_path, **files) == [
        Change("moved", "merge", "vllm.utils", "vllm.somewhere.else_", "uses"),
        Change("signature", "merge", "(rows, mask)", "(rows, mask, out)", "uses"),
    ]


def test_a_removed_class(tmp_path: Path) -> None:
    gone = [c for c in changed(tmp_path, ("class ProcessorInputs", "class Inputs")) if c.where == "ProcessorInputs"]
    assert gone == [Change("removed", "ProcessorInputs", "vllm.multimodal.processing", "", "uses")]


def test_what_mmkit_uses() -> None:
    """Read from its own sources."""
    used = diff.uses()
    assert {"_get_prompt_updates", "_get_mm_fields_config", "embed_multimodal"} <= used.overrides
    assert ("vllm.multimodal.inputs", "MultiModalFieldConfig") in used.imports
    assert "get_merged_mm_kwargs" in used.mentions


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    tree(old, OLD)
    tree(new, {**OLD, PROCESSING: OLD[PROCESSING].replace("def _main(self, prompt", "def _main(self")})
    assert diff.main([str(old), str(old)]) == 0
    assert capsys.readouterr().out.startswith("vLLM 1.0 to 1.0: 0 change(s)")
    assert diff.main([str(old), str(new)]) == 1
    assert "signature BaseMultiModalProcessor._main" in capsys.readouterr().out
    assert diff.main([str(old), str(new), "--json"]) == 1
    assert [change["what"] for change in json.loads(capsys.readouterr().out)["changes"]] == ["signature"]
    with pytest.raises(SystemExit) as stopped:
        diff.main([str(tmp_path), "installed"])
    assert stopped.value.code == 2


def test_it_runs_where_vllm_does_not(tmp_path: Path) -> None:
    """As a script, with nothing but the standard library."""
    tree(tmp_path, OLD)
    command = [sys.executable, "-I", "-S", diff.__file__, str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_installed_version() -> None:
    """Its surface is found, and whether an import works."""
    here = Tree("installed")
    import vllm

    assert here.version.partition("+")[0] == vllm.__version__.partition("+")[0]
    assert {"BaseMultiModalProcessor", "PromptUpdateDetails", "TokenizeParams"} <= {*here.definitions}
    assert here.has("vllm.multimodal.processing", "BaseMultiModalProcessor")  # from one of its modules
    assert here.has("vllm", "ModelRegistry")  # by __getattr__
    assert not here.has("vllm", "NoSuchName")
    assert not here.has("vllm.no_such_module", "ModelRegistry")
