"""``mmkit compare``: a spec beside the processor classes that it replaces.

What is printed is the first difference. A line of the file of requests is ``{"prompt": text or ids,
"items": ["image=photo.png"], "mm_processor_kwargs": {}}``. Refused (`MmkitError`) are a spec, a
class, a folder and a request that cannot be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text
from typer import Exit, Option

from ..errors import MmkitError
from ..importing import import_named
from ..model_spec import ModelSpec
from ..plan.plan import Plan
from .common import Config, Spec, Trust, checkpoint, open_checkpoint, parse_items, plural, reason

Class = Annotated[str, Option("--class", help="A model class, as package.module:Class.")]
Requests = Annotated[Path | None, Option(metavar="FILE", help="Further ones, JSON, one per line.")]
Drawn = Annotated[int, Option(min=0, help="Drawn requests, each as ids and text.")]
Known = Annotated[list[str] | None, Option(metavar="REGEX", help="Pass over what says this.")]


def compare(
    spec: Spec,
    config: Config,
    model_class: Class,
    requests: Requests = None,
    examples: Drawn = 100,
    known: Known = None,
    trust_remote_code: Trust = False,
) -> None:
    """Compare a spec with the processor of a model class. Exit status 1 if they differ."""
    from ..testing import compare as testing
    from ..testing.processors import find_factories

    for pattern in known or ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise MmkitError("--known", "a regular expression", reason(error)) from error
    declared, model = import_named(spec, ModelSpec), import_named(model_class, type)
    if find_factories(model) is None:
        where, expected = f"--class {model_class}", "a model class with a processor"
        remedy = "Name the class that MULTIMODAL_REGISTRY.register_processor decorates."
        raise MmkitError(where, expected, "one without", remedy)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    stored = []
    if requests is not None:
        plan = open_checkpoint(declared, config, **options).plan
        stored = [testing.Given(*parts) for parts in _stored(requests, plan)]
    options |= {"examples": examples, "given_requests": stored, "known": known or ()}
    comparison = testing.compare(declared, checkpoint(config), model, **options)
    console = Console(highlight=False)
    if comparison.difference:
        console.print(Text.assemble(("✗ ", "bold red"), comparison.difference), soft_wrap=True)
        raise Exit(1)
    compared = plural(comparison.requests, "request")
    both = f", {comparison.refused} of them refused by both" if comparison.refused else ""
    but = f", but for {plural(comparison.known, 'known difference')}" if comparison.known else ""
    console.print(Text.assemble(("✓ ", "green"), f"The same of {compared}{both}{but}."))
    if comparison.taken:
        note = f"The class refuses {len(comparison.taken)} that the spec takes, as: "
        console.print(Text.assemble(("– ", "dim"), note, comparison.taken[0]))


def _stored(file: Path, plan: Plan) -> Iterator[tuple[Any, ...]]:
    """The requests of a file, as the arguments of `mmkit.testing.compare.Given`."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise MmkitError(f"--requests {file}", "a file", reason(error)) from error
    for number, line in enumerate(lines, 1):
        where = f"{file}:{number}"
        try:
            sent = json.loads(line)
            prompt, forms = sent["prompt"], sent.get("items", [])
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            expected = '{"prompt": ..., "items": [...]}'
            raise MmkitError(where, expected, reason(error)) from error
        kwargs = sent.get("mm_processor_kwargs", {})
        yield prompt, parse_items(forms, plan), kwargs, forms, where
