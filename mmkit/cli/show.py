"""``mmkit show``: a spec with its values for one checkpoint, and a prompt before and after.

Without a prompt, what a caller writes for the items stands for one; without both, the largest item
of each modality is shown. No engine is started. Refused are a spec that does not fit the checkpoint
(`SpecError`), a request that vLLM's path would refuse (`InputError`), and a folder, an item or a
picture that cannot be read or written (`MmkitError`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from typer import Option

from ..errors import InputError, MmkitError, convert_errors
from ..language.expr import Scope, evaluate
from ..language.field import Field
from ..language.items import write_shape
from ..language.layout import Fixed
from ..language.modality import Modality
from ..language.node import Dependency, dependencies, write_source
from ..language.operations import STATIC
from ..language.spec import Declaration, Output
from ..plan.modality import BoundModality
from ..plan.outline import find_unknown_reads
from ..plan.plan import Plan, Preview
from .common import (
    FOLDER,
    VISIBLE,
    SpecOrDocument,
    Trust,
    count_noun,
    describe_error,
    describe_pieces,
    load_spec,
    open_checkpoint,
    parse_items,
    shorten,
)
from .folding import fold_repetitions

Prompt = Annotated[str | None, Option(help='Show this prompt: a text, or token ids as "1,2,3".')]
ITEM_HELP = "Add an item to the prompt, for example image=640x480 or series=zeros. Repeatable."
Items = Annotated[list[str] | None, Option(metavar="MODALITY=FORM", help=ITEM_HELP)]
Json = Annotated[bool, Option("--json", help="Print the spec as a document, and nothing else.")]
Svg = Annotated[str | None, Option(metavar="FILE", help="Write what is shown to an SVG file.")]

_COLOURS = ("blue", "magenta", "green", "cyan")
_FONTS = re.compile(r"(?s)\s*@font-face \{.*?\}")
"""The fonts of a picture of rich, which would be fetched from elsewhere."""

MAX_CHARACTERS = 180
"""The most characters of a part, and of its value."""

MAX_WORDS_BEFORE = 60
"""The most words of a prompt that are shown before a gap."""

MAX_WORDS_AFTER = 20
"""The most words of a prompt that are shown after a gap."""


def show(
    spec: SpecOrDocument,
    config: Annotated[Path | None, FOLDER] = None,
    prompt: Prompt = None,
    item: Items = None,
    svg: Svg = None,
    as_json: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Show a spec, its values for a checkpoint, and what becomes of a prompt.

    The FORM of an item is zeros, sizes such as 37x1, JSON or a file.

    Example: mmkit show pulse.spec:PULSE --config checkpoint --item series=9x1
    """
    declared = load_spec(spec, import_functions=trust_remote_code)
    if as_json:
        print_document(declared)
        return
    parts: list[RenderableType]
    if config is not None:
        info = open_checkpoint(declared, config, trust_remote_code=trust_remote_code)
        parts = _show_request(info, prompt, item or [])
    elif prompt is not None or item:
        got = "none beside --prompt or --item"
        remedy = "A request wants a config."
        raise MmkitError("--config", "the folder of a checkpoint", got, remedy)
    else:
        parts = [Text(declared.name, "bold")]
        parts += _show_spec(declared, None, _choose_colours(declared))
    if svg is None:
        Console().print(Group(*parts))
    else:
        _save_picture(parts, f"mmkit show {declared.name}", svg)


def print_document(spec: Declaration) -> None:
    """Print a spec as a document."""
    from ..document import to_document

    print(json.dumps(to_document(spec), indent=2, ensure_ascii=False))


def _save_picture(parts: Sequence[RenderableType], title: str, svg: str) -> None:
    """Write what a terminal would show as an SVG file."""
    console = Console(width=110, file=StringIO(), record=True, force_terminal=True)
    console.print(Group(*parts))
    picture = _FONTS.sub("", console.export_svg(title=title))
    try:
        Path(svg).write_text(picture, encoding="utf-8")
    except OSError as error:
        got = describe_error(error)
        remedy = "Choose another place."
        raise MmkitError(f"--svg {svg}", "a file that can be written", got, remedy) from error


def _show_request(info: Any, prompt: str | None, forms: Sequence[str]) -> list[RenderableType]:
    """Return a bound spec, and what becomes of a request.

    Args:
        info: vLLM's processing info of the checkpoint, with the plan.
        prompt: a text, or ids as ``1,2,3``; by default the shortest prompt for the items.
        forms: the items; see `parse_item`. By default, and without a prompt, the largest ones.
    """
    plan: Plan = info.plan
    colours = _choose_colours(plan.spec)
    data = parse_items(forms, plan)
    if not data and prompt is None:
        for name, modality in plan.modalities.items():
            data[name] = [modality.largest_item()]
    if prompt is None:
        ids = plan.shortest_prompt(plan.parse_items(data))
    else:
        ids = parse_prompt(plan, prompt)
    with convert_errors(f"{plan.spec.name}.request", "items that the processor takes", InputError):
        preview = plan.preview(ids, data)
    architectures = info.get_hf_config().architectures or [""]

    def spell(token: int) -> str:
        return _spell_token(info.ctx.tokenizer, token)

    title = Text.assemble((plan.spec.name, "bold"), (f"  {architectures[0]}", "dim"))
    parts: list[RenderableType] = [title]
    parts += _show_spec(plan.spec, plan, colours)
    parts.append(Text(_describe_values(plan), "dim"))
    sentence = describe_pieces(plan)
    if sentence:
        parts.append(Text(f"\n{sentence}", "dim"))
    parts += _show_prompt("prompt", ids, fold_repetitions(spell(token) for token in ids))
    expanded = _spell_expanded_prompt(preview, colours, spell)
    parts += _show_prompt("becomes", preview.prompt_token_ids, expanded)
    parts += _show_items(data, preview, colours)
    return parts


def _choose_colours(spec: Declaration) -> dict[str, str]:
    """Return a colour for each modality."""
    colours: dict[str, str] = {}
    for i, modality in enumerate(spec.modalities):
        colours[modality.name] = _COLOURS[i % len(_COLOURS)]
    return colours


# -- the spec --------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A part of a declaration.

    Attributes:
        part: its name.
        declared: its source.
        value: what it is for the checkpoint; empty without one.
    """

    part: str
    declared: str
    value: str = ""


def _show_spec(
    spec: Declaration, plan: Plan | None, colours: Mapping[str, str]
) -> list[RenderableType]:
    """Return modalities and outputs as declared, with their values where there is a plan."""
    rows_by_name: dict[str, list[_Row]] = {}
    for modality in spec.modalities:
        bound = plan.modalities.get(modality.name) if plan else None
        rows_by_name[modality.name] = _list_modality(modality, bound)
    if plan is not None:
        for name, output in plan.outputs.items():
            rows_by_name[name] = _list_output(output.spec, plan)
    elif callable(spec.outputs):
        rows_by_name["outputs"] = [_Row("function", write_source(spec.outputs))]
    else:
        for declared in spec.outputs:
            rows_by_name[declared.name] = _list_output(declared, plan)
    parts: list[RenderableType] = []
    for name, rows in rows_by_name.items():
        colour = colours.get(name, "")
        table = _make_table()
        for row in rows:
            table.add_row(
                Text(row.part, "dim"),
                Text(shorten(row.declared, MAX_CHARACTERS)),
                Text(shorten(row.value, MAX_CHARACTERS), colour),
            )
        parts += [Text(), Text(name, f"bold {colour}"), table]
    return parts


def _list_modality(modality: Modality, bound: BoundModality | None) -> list[_Row]:
    """Return the parts of a modality; those with a default, only where they differ from it."""
    rows = [
        _Row("item", write_source(modality.item), repr(bound.item) if bound else ""),
        _Row("layout", repr(modality.layout), _describe_layout(bound) if bound else ""),
    ]
    for update in modality.update:
        rows.append(_Row("update", repr(update)))
    if bound:
        rows.append(_Row("without pixels", "", _describe_outline(bound)))
    for name, field in modality.fields.items():
        value = ""
        if bound and name in bound.fields:
            value = _describe_field(bound.fields[name])
        rows.append(_Row(f"field {name}", repr(field), value))
    rows.append(_Row("process", write_source(modality.process)))
    defaults = {"limit": None, "embeds": False, "cacheable": True, "positions": None, "when": True}
    for name, default in defaults.items():
        declared = getattr(modality, name)
        if declared is not default:
            value = str(bound.limit) if bound and name == "limit" else ""
            rows.append(_Row(name, write_source(declared), value))
    return rows


def _describe_outline(bound: BoundModality) -> str:
    """Return whether the facts of an item tell its layout, or what keeps them from it."""
    reads = find_unknown_reads(bound)
    if not reads:
        return "yes"
    return f"no: the layout reads {', '.join(reads)}"


def _describe_field(field: Field) -> str:
    """Return shape and dtype of a bound field, as far as they are declared."""
    words: list[str] = []
    if field.shape is not None:
        words.append(write_shape(field.shape))
    if field.dtype:
        words.append(str(field.dtype))
    return " ".join(words)


def _list_output(output: Output, plan: Plan | None) -> list[_Row]:
    """Return the parts of an output."""
    tokens = ""
    form = ""
    if plan:
        bound = plan.outputs[output.name]
        allowed = " ".join(fold_repetitions(str(ids) for ids in bound.allowed))
        tokens = f"{count_noun(len(bound.allowed), 'token')}: {allowed}"
        # `decode` may read what the folder lacks, for example weights
        with suppress(MmkitError):
            form = f"{write_shape(bound.shape)} {bound.dtype}"
    rows = [
        _Row("layout", repr(output.layout), tokens),
        _Row("decode", write_source(output.decode), form),
    ]
    if output.encode is not None:
        rows.append(_Row("encode", write_source(output.encode)))
    for name in ("after", "until", "most"):
        declared = getattr(output, name)
        if declared is not None:
            value = str(getattr(plan.outputs[output.name], name)) if plan else ""
            rows.append(_Row(name, write_source(declared), value))
    return rows


def _describe_layout(bound: BoundModality) -> str:
    """Return the ids of a bound layout, or its formula where they depend on the item."""
    layout = bound.layout_evaluator.layout
    if not isinstance(layout, Fixed):
        return repr(layout)
    return " ".join(fold_repetitions(str(token) for token in layout.ids))


def _describe_values(plan: Plan) -> str:
    """Return what the modalities read of the config and the Hugging Face processor."""
    scopes: dict[str, tuple[Dependency, Scope]] = {}
    for modality in plan.modalities.values():
        for dependency in dependencies(modality.spec):
            if dependency.root in STATIC and dependency.keys:
                scopes[repr(dependency)] = (dependency, modality.static)
    texts: list[str] = []
    for name in sorted(scopes):
        dependency, scope = scopes[name]
        # a branch of a where() that this config does not take may have no value
        with suppress(MmkitError):
            value = evaluate(dependency.expr, scope)
            if not callable(value):
                texts.append(f"{name} = {shorten(repr(value), 80)}")
    return f"\nwith {', '.join(texts)}" if texts else ""


# -- the request -----------------------------------------------------------------------------------


def parse_prompt(plan: Plan, prompt: str) -> list[int]:
    """Return the ids of a prompt: ids as ``1,2,3``, or a text, tokenized as vLLM does."""
    if re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", prompt):
        return [int(token) for token in prompt.split(",")]
    return plan.encode(prompt)


def _spell_expanded_prompt(
    preview: Preview, colours: Mapping[str, str], spell: Callable[[int], str]
) -> list[str]:
    """Return the words of an expanded prompt in rich's markup.

    Layouts are underlined in the colour of their modality; positions that receive encoder rows are
    reversed.
    """
    ids = preview.prompt_token_ids
    words: list[str] = []
    cursor = 0
    for placement in preview.placements:
        words += fold_repetitions(spell(token) for token in ids[cursor : placement.start])
        colour = colours[placement.modality]
        layout_words: list[str] = []
        for i, is_embed in enumerate(placement.tokens.mask):
            style = "reverse" if is_embed else "underline"
            text = spell(ids[placement.start + i])
            layout_words.append(f"[{style} {colour}]{text}[/]")
        words += fold_repetitions(layout_words)
        cursor = placement.end
    words += fold_repetitions(spell(token) for token in ids[cursor:])
    return words


def _show_prompt(title: str, ids: Sequence[int], words: Sequence[str]) -> list[RenderableType]:
    """Return a prompt under a title, with a gap where it is long."""
    shown = list(words)
    if len(words) > MAX_WORDS_BEFORE + MAX_WORDS_AFTER:
        shown = shown[:MAX_WORDS_BEFORE] + ["…"] + shown[-MAX_WORDS_AFTER:]
    return [
        Rule(style="dim"),
        Text.assemble((title, "bold"), (f"  {count_noun(len(ids), 'token')}", "dim")),
        Padding(Text.from_markup(" ".join(shown)), (0, 2)),
    ]


def _show_items(
    data: Mapping[str, Sequence[Any]], preview: Preview, colours: Mapping[str, str]
) -> list[RenderableType]:
    """Return the place of each item, and its part of each processed tensor."""
    table = _make_table()
    for placement in preview.placements:
        name = placement.modality
        index = placement.index
        item = describe_item(data[name][index])
        rows = count_noun(placement.tokens.num_embeds, "row")
        tensors: list[str] = []
        for field_name, value in preview.fields[name][index].items():
            tensors.append(f"{field_name} {_describe_value(value)}")
        table.add_row(
            Text(f"{name}[{index}] · {item}", colours[name]),
            f"prompt[{placement.start}:{placement.end}], {rows}",
            Text("\n".join(tensors), "dim"),
        )
    return [Text(), table]


def describe_item(value: Any) -> str:
    """Return an item in a few words.

    For example ``6×3``, ``640×480``, ``8 frames of 64×64``, ``ids 5, name 3 characters``.
    """
    if isinstance(value, dict):
        return ", ".join(f"{name} {describe_item(part)}" for name, part in value.items())
    if isinstance(value, str):
        return count_noun(len(value), "character")
    media = getattr(value, "media", value)
    if hasattr(media, "getbands"):  # a picture of PIL
        width, height = media.size
        return f"{width}×{height}"
    if isinstance(media, tuple):  # samples with their rate, or frames with metadata
        return describe_item(media[0])
    shape = np.shape(media)
    if len(shape) == 4 and shape[-1] == 3:
        return f"{shape[0]} frames of {shape[2]}×{shape[1]}"
    if not shape:
        return "a number"
    return "×".join(str(size) for size in shape)


def _describe_value(value: Any) -> str:
    """Return shape and dtype of a tensor, or the type of another value."""
    dtype = getattr(value, "dtype", type(value).__name__)
    text = str(dtype).removeprefix("torch.")
    if getattr(value, "shape", ()):
        text = f"{write_shape(tuple(value.shape))} {text}"
    return text


def _spell_token(tokenizer: Any, token: int) -> str:
    """Return the text of an id in rich's markup, or its number where no text can be read."""
    text = ""
    if tokenizer is not None:
        text = str(tokenizer.convert_ids_to_tokens(token)).translate(VISIBLE)
    if not text or not text.isprintable():
        return str(token)
    return escape(shorten(text, 40))


def _make_table() -> Table:
    return Table(box=None, show_header=False, padding=(0, 0, 0, 2))
