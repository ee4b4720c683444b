"""``mmkit compare``: a spec beside the processor classes that it replaces.

What is printed is the first difference. A line of the file of requests is ``{"prompt": text or ids,
"items": ["image=photo.png"], "mm_processor_kwargs": {}}``. Refused (`MmkitError`) are a spec, a
class, a folder and a request that cannot be read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.text import Text
from typer import Exit, Option

from ..errors import MmkitError
from ..importing import import_named
from ..plan.plan import Plan
from . import collect_garbage
from .common import (
    Config,
    SpecOrDocument,
    Trust,
    count_noun,
    describe_error,
    find_checkpoint,
    load_spec,
    open_checkpoint,
    parse_items,
)

if TYPE_CHECKING:
    from ..testing.compare import Comparison, Given

Class = Annotated[str, Option("--class", help="The model class, as package.module:Class.")]
REQUESTS_HELP = "Compare the requests of this file, too: JSON, one request a line."
Requests = Annotated[Path | None, Option(metavar="FILE", help=REQUESTS_HELP)]
DRAWN_HELP = "Draw this many requests, each as ids and as text."
Drawn = Annotated[int, Option(min=0, help=DRAWN_HELP)]
KNOWN_HELP = "Ignore differences whose sentence matches REGEX. Repeatable."
Known = Annotated[list[str] | None, Option("--known", metavar="REGEX", help=KNOWN_HELP)]


def compare(
    spec: SpecOrDocument,
    config: Config,
    model_class: Class,
    requests: Requests = None,
    examples: Drawn = 100,
    known_differences: Known = None,
    trust_remote_code: Trust = False,
) -> None:
    """Compare a spec with the processor of a model class.

    Exit status 1 if they differ, or if the class refuses every request with items of a modality.

    Example: mmkit compare pulse.spec:PULSE --config checkpoint --class pulse.old:PulseForCausalLM
    """
    from ..testing import compare as testing
    from ..vllm_api.checkpoint_processors import find_factories

    if not examples and requests is None:
        raise MmkitError("--examples 0", "requests to compare", "none", "Add --requests FILE.")
    patterns = known_differences or []
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise MmkitError("--known", "a regular expression", describe_error(error)) from error
    declared = load_spec(spec, import_functions=trust_remote_code)
    model: type = import_named(model_class, type)
    if find_factories(model) is None:
        where = f"--class {model_class}"
        remedy = "Name the class that MULTIMODAL_REGISTRY.register_processor decorates."
        raise MmkitError(where, "a model class with a processor", "one without", remedy)
    stored_requests: list[testing.Given] = []
    if requests is not None:
        info = open_checkpoint(declared, config, trust_remote_code=trust_remote_code)
        stored_requests = _load_requests(requests, info.plan)
    collect_garbage()
    comparison = testing.compare(
        declared,
        find_checkpoint(config),
        model,
        examples=examples,
        given_requests=stored_requests,
        known=patterns,
        trust_remote_code=trust_remote_code,
    )
    _print_comparison(comparison)
    if not comparison:
        raise Exit(1)


def _print_comparison(comparison: Comparison) -> None:
    """Print the first difference, or how many requests had none and which were not compared."""
    console = Console(highlight=False)
    refused_by_class = comparison.refused_by_class
    if comparison.difference:
        _print_failure(console, comparison.difference)
        return
    if comparison:
        console.print(Text.assemble(("✓ ", "green"), _describe_agreement(comparison)))
    for modality in comparison.not_compared:
        count = count_noun(comparison.requests_by_modality[modality], "request")
        observation = f"No request with items of {modality} was compared"
        _print_failure(console, f"{observation}: the class refuses each ({count}).")
    if refused_by_class:
        note = f"The class refuses {len(refused_by_class)} that the spec takes, as: "
        console.print(Text.assemble(("– ", "dim"), note, refused_by_class[0]), soft_wrap=True)


def _describe_agreement(comparison: Comparison) -> str:
    """Return how many requests had no difference, as a sentence."""
    compared = comparison.requests - len(comparison.refused_by_class)
    result = f"The same of {count_noun(compared, 'request')}"
    if comparison.refused:
        result += f", {comparison.refused} of them refused by both"
    if comparison.known_differences:
        result += f", but for {count_noun(comparison.known_differences, 'known difference')}"
    return f"{result}."


def _print_failure(console: Console, sentence: str) -> None:
    console.print(Text.assemble(("✗ ", "bold red"), sentence), soft_wrap=True)


def _load_requests(file: Path, plan: Plan) -> list[Given]:
    """Return the requests of a file, one JSON object a line."""
    from ..testing.compare import Given

    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise MmkitError(f"--requests {file}", "a file", describe_error(error)) from error
    requests: list[Given] = []
    for number, line in enumerate(lines, 1):
        where = f"{file}:{number}"
        try:
            entries = json.loads(line)
            prompt = entries["prompt"]
            forms = entries.get("items", [])
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            expected = '{"prompt": ..., "items": [...]}'
            raise MmkitError(where, expected, describe_error(error)) from error
        kwargs = entries.get("mm_processor_kwargs", {})
        requests.append(Given(prompt, parse_items(forms, plan), kwargs, forms, where))
    return requests
