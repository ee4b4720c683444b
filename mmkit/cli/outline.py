"""``mmkit outline``: the ids, the ranges and the keys of a request from the sizes of its items.

No item is processed. Refused are a layout that reads what only processing tells (`SpecError`), a
request that vLLM's path would refuse (`InputError`), and a folder or a file that cannot be read
(`MmkitError`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text
from typer import Option

from ..errors import MmkitError
from ..language.items import ItemType
from ..language.items.facts import Facts, TensorFacts
from ..plan.outline import Outline, decode_audio_file, inspect_image_file
from ..plan.plan import Plan
from .common import (
    Config,
    SpecOrDocument,
    Trust,
    count_noun,
    describe_error,
    load_spec,
    open_checkpoint,
    parse_item,
)
from .show import Prompt, parse_prompt

Items = Annotated[
    list[str] | None,
    Option(
        metavar="MODALITY=FORM",
        help="Add an item, for example image=1280x720, or a file. Repeatable.",
    ),
]

_READERS: Mapping[str, Any] = {
    ".png": inspect_image_file,
    ".jpg": inspect_image_file,
    ".jpeg": inspect_image_file,
    ".webp": inspect_image_file,
    ".gif": inspect_image_file,
    ".wav": decode_audio_file,
    ".flac": decode_audio_file,
}


def outline(
    spec: SpecOrDocument,
    config: Config,
    prompt: Prompt = None,
    item: Items = None,
    trust_remote_code: Trust = False,
) -> None:
    """Show what follows of a request from the sizes of its items: ids, ranges, rows and hashes.

    An item is sizes, JSON or a file. A hash is the hash in a server whose --model is the text of
    --config; of sizes alone there is none.
    """
    from ..vllm_api.hashes import make_hasher

    declared = load_spec(spec, import_functions=trust_remote_code)
    info = open_checkpoint(declared, config, trust_remote_code=trust_remote_code)
    plan: Plan = info.plan
    data: dict[str, list[Any]] = {}
    for form in item or []:
        name, value = _parse_facts(form, plan)
        data.setdefault(name, []).append(value)
    ids = parse_prompt(plan, prompt) if prompt is not None else None
    if ids is None:
        ids = plan.shortest_prompt(plan.parse_facts(data))
    _print_outline(plan.outline(ids, data, hasher=make_hasher(info)))


def _parse_facts(form: str, plan: Plan) -> tuple[str, Any]:
    """Return the modality, and the facts or the item, that ``modality=FORM`` means.

    FORM is sizes, the file of an image or of audio, or what `parse_item` takes.
    """
    name, _, text = form.partition("=")
    if name not in plan.modalities:
        return parse_item(form, plan)  # refuses the name
    kind = plan.modalities[name].item
    if re.fullmatch(r"\d+(x\d+)*", text):
        return name, _make_facts(kind, [int(size) for size in text.split("x")], form)
    path = Path(text)
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        return parse_item(form, plan)
    try:
        data = path.read_bytes()
    except OSError as error:
        expected = f"a {suffix} file that can be read"
        raise MmkitError(f"--item {form}", expected, describe_error(error)) from error
    return name, _READERS[suffix](data, f"--item {form}")


def _make_facts(kind: ItemType, sizes: Sequence[int], form: str) -> Facts:
    """Return the facts of an item of some sizes."""
    facts_class: Any = kind.facts_class
    if kind.is_nested or facts_class is None or len(sizes) != kind.num_sizes:
        expected = kind.size_hint
        if not kind.is_nested:
            expected = f"{kind.size_hint}, {kind.num_sizes} size(s)"
        raise MmkitError(f"--item {form}", expected, str(len(sizes)))
    if facts_class is TensorFacts:
        return TensorFacts(shape=tuple(sizes))
    facts: Facts = facts_class(**dict(zip(facts_class.size_names, sizes, strict=True)))
    return facts


def _print_outline(outlined: Outline) -> None:
    console = Console(highlight=False)
    num_tokens = count_noun(len(outlined.prompt_token_ids), "token")
    console.print(Text.assemble(("becomes", "bold"), f"  {num_tokens}"))
    for placement in outlined.placements:
        name, index = placement.modality, placement.index
        place = f"prompt[{placement.start}:{placement.end}]"
        rows = count_noun(outlined.rows[name][index], "row")
        key = outlined.hashes[name][index] or "unknown"
        line = f"  {name}[{index}]  {place}, {rows}  hash {key}"
        console.print(Text(line), soft_wrap=True)
    for name, fields in outlined.uncomputed_fields.items():
        if fields:
            line = f"  not computed of {name}: {', '.join(fields)}"
            console.print(Text(line), soft_wrap=True)
