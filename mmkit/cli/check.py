"""``mmkit check``: why a spec cannot be bound to a checkpoint, then the laws, as tests of pytest.

It runs the laws that load no model with dummy weights. The law `logprobs` starts an engine where
vLLM runs a class as it was trained, and the checkpoint has weights. The exit status is 1 if the
spec cannot be bound or a law failed. pytest reads neither settings of this directory nor its
`conftest.py`. Refused (`MmkitError`) are a folder, a file or a function that cannot be read, and
where pytest is missing. `mmkit.testing.plugin` reads `samples` and `expected`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.text import Text
from typer import Context, Exit, Option

from ..errors import SpecError
from ..importing import import_named
from ..model_spec import ModelSpec
from . import collect_garbage
from .common import Config, Spec, Trust, count_noun, find_checkpoint, open_checkpoint, require_vllm

Examples = Annotated[int | None, Option(min=1, help="Draw this many examples for each law.")]
SAMPLES_HELP = "Draw items from the strategies that this function, module:function, returns."
Samples = Annotated[str | None, Option(metavar="FUNCTION", help=SAMPLES_HELP)]
VIOLATIONS_HELP = "Accept the violations that this TOML file lists."
Violations = Annotated[Path | None, Option(metavar="FILE", help=VIOLATIONS_HELP)]


def check(
    context: Context,
    spec: Spec,
    config: Config,
    examples: Examples = None,
    samples: Samples = None,
    expected: Violations = None,
    trust_remote_code: Trust = False,
) -> None:
    """Bind a spec to a checkpoint and check the laws, each as a test.

    SPEC may be `registered`, for the processor that vLLM has.

    Options that are not listed here go to pytest: -k cache, -n 4, --lf.

    Example: mmkit check pulse.spec:PULSE --config checkpoint -k cache
    """
    path = find_checkpoint(config)
    if spec != "registered":
        declared = import_named(spec, ModelSpec)
        try:
            open_checkpoint(declared, path, trust_remote_code=trust_remote_code)
        except SpecError as error:
            _print_reasons(declared.name, error)
            raise Exit(1) from error
    with require_vllm():
        import pytest

        from ..testing.plugin import load_expected
    load_expected(expected)
    if samples is not None:
        import_named(samples)
    arguments = ["--mmkit", spec, "--mmkit-model", str(path)]
    options = {"examples": examples, "samples": samples, "expected": expected}
    for name, value in options.items():
        if value is not None:
            arguments.append(f"--mmkit-{name}={value}")
    if trust_remote_code:
        arguments.append("--mmkit-trust-remote-code")
    arguments += ["-c", os.devnull, "--rootdir", os.getcwd(), "--noconftest"]
    arguments += ["-v", "-rs", "--no-header", "--disable-warnings"]
    arguments += context.args
    collect_garbage()
    raise Exit(int(pytest.main(arguments)))


def _print_reasons(name: str, error: SpecError) -> None:
    """Print why a spec cannot be bound.

    There is one sentence for each part of each modality that cannot, in the order of the
    declaration.
    """
    console = Console(highlight=False)
    reasons = [str(error)]
    for further in error.others:
        if str(further) not in reasons:
            reasons.append(str(further))
    for reason in reasons:
        console.print(Text.assemble(("✗ ", "bold red"), reason))
    count = count_noun(len(reasons), "error")
    console.print(Text(f"\n{name}: {count}, it cannot be bound."))
