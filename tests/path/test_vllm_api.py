"""Which vLLM mmkit takes: generations told by their features, overrides that vLLM no longer calls, newer versions.

A future vLLM is the installed one with a file of `vllm.multimodal` changed: a tree of links to it, and the changed file
in its place, before it on the path of another process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

import mmkit.vllm_api
from mmkit.vllm_api.hooks import complaints
from mmkit.vllm_api.moved import NEWEST_TESTED

ROOT = Path(__file__).parents[2]
API = ROOT / "mmkit" / "vllm_api"
PROCESSOR, CONTEXT = "multimodal/processing/processor.py", "multimodal/processing/context.py"
PATTERN = r"\b{}\b"


def future(folder: Path, changes: dict[str, list[tuple[str, str]]]) -> Path:
    """A vLLM in which some patterns of some files are replaced: a folder for PYTHONPATH."""
    installed = Path(vllm.__file__).parent
    for name, replacements in changes.items():
        at, there = folder / "vllm", installed
        for part in Path(name).parts:  # links beside every folder on the way
            at.mkdir(parents=True, exist_ok=True)
            for entry in there.iterdir():
                link = at / entry.name
                if entry.name != part and not link.exists() and entry.name != "__pycache__":
                    link.symlink_to(entry)
            at, there = at / part, there / part
        if at.is_symlink():
            at.unlink()
        text = there.read_text()
        for pattern, replacement in replacements:
            text, count = re.subn(pattern, replacement, text)
            assert count, f"{pattern} is not in {name}"
        at.write_text(text)
    return folder


def imported(path: Path) -> str:
    """What `import mmkit.vllm_api` says with that vLLM: the last line of its errors, or its warnings."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "always:mmkit",
            "-c",
            "import mmkit.vllm_api; print(mmkit.vllm_api.generation.__name__)",
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(path), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        capture_output=True,
        text=True,
        timeout=250,
    )
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return done.stdout.strip() + "".join(line for line in done.stderr.splitlines() if "mmkit was tested" in line)


def version(text: str) -> dict[str, list[tuple[str, str]]]:
    return {"_version.py": [(r"(?m)^__version__ = .*$", f"__version__ = version = {text!r}")]}


REMEDY = f"Install vLLM 0.11.2 to {NEWEST_TESTED}, or a newer mmkit."
FUTURES = {
    "renamed": (
        {PROCESSOR: [(PATTERN.format("_get_prompt_updates"), "_get_updates_of_prompt")]},
        ", BaseMultiModalProcessor: expected a method _get_prompt_updates(mm_items, hf_processor_mm_kwargs, "
        "out_mm_kwargs) to override, got none.",
    ),
    "removed": (
        {
            PROCESSOR: [
                (r"def _recompute_cached_prompt_update\((.|\n)*?(?=\n    def )", ""),
                (r"self\._recompute_cached_prompt_update\(update, item_idx\)", "replace(update, item_idx=item_idx)"),
            ]
        },
        ", BaseMultiModalProcessor: expected a method _recompute_cached_prompt_update(cached_update, new_item_idx) to "
        "override, got none.",
    ),
    "argument": (
        {CONTEXT: [(r"(def validate_num_items\(self, modality: str, num_items: int)", r"\1, request_id: str")]},
        ", BaseProcessingInfo.validate_num_items: expected the arguments (modality, num_items), got (modality, "
        "num_items, request_id).",
    ),
    "dead": (
        {
            PROCESSOR: [
                (r"self\._recompute_cached_prompt_update\(update, item_idx\)", "replace(update, item_idx=item_idx)")
            ]
        },
        ", BaseMultiModalProcessor._recompute_cached_prompt_update: expected a method that vLLM calls, got no "
        "call of it.",
    ),
    "unrecognised": (
        {
            "multimodal/processing/__init__.py": [(PATTERN.format("ProcessorInputs"), "ProcessorRequest")],
            "multimodal/processing/inputs.py": [(PATTERN.format("ProcessorInputs"), "ProcessorRequest")],
            PROCESSOR: [(PATTERN.format("ProcessorInputs"), "ProcessorRequest")],
        },
        ": expected ProcessorInputs in vllm.multimodal.processing or ProcessorInputs in vllm.multimodal.profiling, got "
        "none.",
    ),
}


@pytest.mark.parametrize("name", FUTURES)
def test_an_incompatible_vllm_is_refused(name: str, tmp_path: Path) -> None:
    changes, sentence = FUTURES[name]
    said = imported(future(tmp_path, {**changes, **version("0.99.0")}))
    assert said == f"mmkit.errors.VllmApiError: vLLM 0.99.0{sentence} {REMEDY}"


def test_a_newer_vllm_that_fits_is_taken_with_a_warning(tmp_path: Path) -> None:
    said = imported(future(tmp_path, version("0.99.0")))
    assert said.startswith(mmkit.vllm_api.generation.__name__)
    assert f"mmkit was tested up to vLLM {NEWEST_TESTED}, this is vLLM 0.99.0." in said


def test_this_vllm_is_taken_without_one() -> None:
    assert imported(ROOT) == mmkit.vllm_api.generation.__name__


def test_every_override_is_called() -> None:
    """Of the generation in use; marks are not lost on the way."""
    marked = {
        name
        for cls in mmkit.vllm_api.generation.HOOKS
        for base in cls.__mro__
        for name, value in vars(base).items()
        if getattr(value, "__override__", False)
    }
    assert not complaints(mmkit.vllm_api.generation.HOOKS)
    assert {"_get_prompt_updates", "_get_mm_fields_config", "_apply_prompt_updates", "get_data_parser"} <= marked


def test_nothing_of_vllm_is_overridden_without_a_mark() -> None:
    """A method or property that vLLM also has is an override; the mark has it checked."""
    unmarked = []
    for cls in mmkit.vllm_api.generation.HOOKS:
        theirs = [base for base in cls.__mro__ if not base.__module__.startswith("mmkit.")]
        for base in cls.__mro__:
            if base not in theirs:
                unmarked += [
                    f"{base.__name__}.{name}"
                    for name, value in vars(base).items()
                    if callable(value) and not name.startswith("__") and not getattr(value, "__override__", False)
                    if any(name in vars(b) for b in theirs)
                ]
    assert not unmarked


def test_generation_modules_are_small() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in API.glob("generation_*.py")}
    assert len(lines) == 4
    assert max(lines.values()) < 150
    shared = sum(len((API / name).read_text().splitlines()) for name in ("requests.py", "prompts.py"))
    assert sum(lines.values()) + shared < 500


def test_only_the_adapters_know_a_version() -> None:
    """Outside vllm_api/ nothing asks for vLLM's version, and no import of vLLM has an alternative."""
    for path in [*(ROOT / "mmkit").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        if path.parent != API:
            text = path.read_text()
            assert "vllm.__version__" not in text, path
            assert not re.search(r"try:\n\s+(from|import) vllm", text), path
