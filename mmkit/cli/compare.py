"""``mmkit compare``: a spec beside the processor classes that it replaces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..model_spec import ModelSpec
from ..plugin import named
from .common import UsageError, checkpoint, open_checkpoint, parse_items, plural, reason


def run(
    spec: ModelSpec,
    folder: str | Path,
    model_class: str,
    *,
    requests: Path | None = None,
    examples: int = 100,
    known: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> int:
    """Compare a spec with the processor of a model class, and print the first difference.

    Args:
        spec: the declaration.
        folder: folder of the checkpoint.
        model_class: ``package.module:Class`` of a class that has a processor in vLLM.
        requests: a file with a request per line, as JSON: ``{"prompt": text or ids, "items":
            ["image=photo.png"], "mm_processor_kwargs": {}}``.
        examples: number of drawn requests.
        known: regular expressions of differences that are passed over.
        trust_remote_code: run code that the checkpoint brings.

    Returns:
        The exit status: 1 if they differ.

    Raises:
        UsageError: a class, a folder or a request that cannot be read.
    """
    from ..testing.compare import compare

    for pattern in known:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError("--known", "a regular expression", reason(error)) from error
    console = Console(highlight=False)
    path, model = checkpoint(folder), _load_class(model_class)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    stored = [*_stored(requests, spec, path, trust_remote_code)] if requests else []
    options |= {"examples": examples, "given_requests": stored, "known": known}
    comparison = compare(spec, path, model, **options)
    if comparison.difference:
        console.print(Text.assemble(("✗ ", "bold red"), comparison.difference), soft_wrap=True)
        return 1
    compared = plural(comparison.requests, "request")
    both = f", {comparison.refused} of them refused by both" if comparison.refused else ""
    but = f", but for {plural(comparison.known, 'known difference')}" if comparison.known else ""
    console.print(Text.assemble(("✓ ", "green"), f"The same of {compared}{both}{but}."))
    if comparison.taken:
        note = f"The class refuses {len(comparison.taken)} that the spec takes, as: "
        console.print(Text.assemble(("– ", "dim"), note, comparison.taken[0]))
    return 0


def _load_class(target: str) -> type:
    from ..testing.vllm_path import factories_of  # imports vLLM

    model: type = named(target, type)
    if factories_of(model) is None:
        where, expected = f"--class {target}", "a model class with a processor"
        remedy = "Name the class that MULTIMODAL_REGISTRY.register_processor decorates."
        raise UsageError(where, expected, "one without", remedy)
    return model


def _stored(file: Path, spec: ModelSpec, folder: Path, trust: bool) -> Iterator[Any]:
    """The requests of a file, each with its items."""
    from ..testing.compare import Given

    plan = open_checkpoint(spec, folder, trust_remote_code=trust).plan
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"--requests {file}", "a file", reason(error)) from error
    for number, line in enumerate(lines, 1):
        where = f"{file}:{number}"
        try:
            sent = json.loads(line)
            prompt, forms = sent["prompt"], sent.get("items", [])
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            expected = '{"prompt": ..., "items": [...]}'
            raise UsageError(where, expected, reason(error)) from error
        kwargs = sent.get("mm_processor_kwargs", {})
        yield Given(prompt, parse_items(forms, plan), kwargs, forms, where)
