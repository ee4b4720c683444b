"""``mmkit check``: every reason why a spec cannot be bound to a checkpoint, then the laws that need
no engine, as tests of pytest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..errors import SpecError
from ..expr import Scope
from ..model_spec import ModelSpec
from ..plugin import named
from .common import checkpoint, needs_vllm, open_checkpoint, plural


def run(
    target: str,
    folder: str | Path,
    arguments: Sequence[str] = (),
    *,
    samples: str | None = None,
    expected: Path | None = None,
    examples: int | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Bind a spec to a checkpoint, then check its laws, without an engine and without weights.

    Args:
        target: the name of a spec; `registered` for the processor that vLLM, or a plugin, has for
            the checkpoint.
        folder: folder of the checkpoint.
        arguments: further ones for pytest, which neither reads settings of this directory nor its
            `conftest.py`.
        samples: ``package.module:function``, which returns strategies for items, by modality.
        expected: a file of known violations; see `mmkit.testing.plugin.expectations`.
        examples: Hypothesis examples per law.
        trust_remote_code: run code that the checkpoint brings.

    Returns:
        The exit status: 1 if the spec cannot be bound or a law failed.

    Raises:
        MmkitError: a folder, a file or a function that cannot be read, or pytest is missing.
    """
    path = checkpoint(folder)
    if target != "registered":
        spec: ModelSpec = named(target, ModelSpec)
        remedy = ""
        try:
            opened = open_checkpoint(spec, path, trust_remote_code=trust_remote_code)
        except SpecError as error:
            reasons = _all(error)
        else:
            reasons, remedy = binding_errors(spec, opened.scope), opened.remedy
        if reasons:
            console = Console(highlight=False)
            for reason in reasons:
                console.print(Text.assemble(("✗ ", "bold red"), reason))
            count = plural(len(reasons), "error")
            summary = f"\n{spec.name}: {count}, it cannot be bound. {remedy}"
            console.print(Text(summary.rstrip()))
            return 1
    with needs_vllm():
        import pytest

        from ..testing.plugin import expectations
    expectations(expected)
    if samples is not None:
        named(samples)
    given = {"examples": examples, "samples": samples, "expected": expected}
    options = [f"--mmkit-{name}={value}" for name, value in given.items() if value is not None]
    options += ["--mmkit-trust-remote-code"] * trust_remote_code
    alone = ("-c", os.devnull, "--rootdir", os.getcwd(), "--noconftest")
    told = ("-v", "-rs", "--no-header", "--disable-warnings")
    asked = ("--mmkit", target, "--mmkit-model", str(path), *options)
    return int(pytest.main([*asked, *alone, *told, *arguments]))


def binding_errors(spec: ModelSpec, scope: Scope) -> list[str]:
    """The reasons why a spec cannot be bound: one sentence for each part of each modality that
    cannot, in the order of the declaration."""
    try:
        spec.bind(scope.cfg, scope.tok, processor=scope.proc, kwargs=scope.kwargs)
    except SpecError as error:
        return _all(error)
    except Exception as error:  # of a function of the spec, or of the Hugging Face processor
        return [f"{type(error).__name__}: {error}"]
    return []


def _all(error: SpecError) -> list[str]:
    return [*dict.fromkeys(map(str, (error, *error.others)))]
