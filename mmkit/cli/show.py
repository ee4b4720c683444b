"""``mmkit show``: a spec with its values for one checkpoint, and a prompt before and after.

Without a prompt, what a caller writes for the items stands for one; without both, the largest item
of each modality is shown. No engine is started. Refused are a spec that does not fit the checkpoint
(`SpecError`), a request that vLLM's path would refuse (`InputError`), and a folder, an item or a
picture that cannot be read or written (`MmkitError`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import StringIO
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from typer import Option

from ..errors import InputError, MmkitError, convert_errors
from ..importing import import_named
from ..language.expr import STATIC, evaluate
from ..language.items import shape_text
from ..language.layout import Fixed
from ..language.modality import Modality
from ..language.node import dependencies, write_source
from ..language.spec import Declaration, Output
from ..model_spec import ModelSpec
from ..plan.modality import BoundModality
from ..plan.plan import Plan, Preview
from .common import (
    FOLDER,
    Spec,
    Trust,
    count_noun,
    describe_error,
    open_checkpoint,
    parse_items,
    shorten,
)

Prompt = Annotated[str | None, Option(help='A text, or token ids as "1,2,3".')]
Items = Annotated[list[str] | None, Option(metavar="MODALITY=FORM", help="As image=640x480.")]
Svg = Annotated[str | None, Option(metavar="FILE", help="Write a picture.")]

_COLOURS = ("blue", "magenta", "green", "cyan")
_FONTS = re.compile(r"(?s)\s*@font-face \{.*?\}")
"""Those of a picture of rich, which would be fetched from elsewhere."""
_WIDTH = 180
"""Characters of a part, and of its value."""


def show(
    spec: Spec,
    config: Annotated[Path | None, FOLDER] = None,
    prompt: Prompt = None,
    item: Items = None,
    svg: Svg = None,
    trust_remote_code: Trust = False,
) -> None:
    """Show a spec, its values for a checkpoint, and what becomes of a prompt. An item is zeros,
    sizes, JSON or a file."""
    declared: ModelSpec = import_named(spec, ModelSpec)
    parts: Iterable[RenderableType]
    if config is not None:
        info = open_checkpoint(declared, config, trust_remote_code=trust_remote_code)
        parts = _bound(info, prompt, item or ())
    elif prompt is not None or item:
        got, remedy = "none beside --prompt or --item", "A request wants a config."
        raise MmkitError("--config", "the folder of a checkpoint", got, remedy)
    else:
        parts = [Text(declared.name, "bold"), *_declared(declared, None, _colours(declared))]
    if svg is None:
        Console().print(Group(*parts))
        return
    console = Console(width=110, file=StringIO(), record=True, force_terminal=True)
    console.print(Group(*parts))
    picture = _FONTS.sub("", console.export_svg(title=f"mmkit show {declared.name}"))
    try:
        Path(svg).write_text(picture, encoding="utf-8")
    except OSError as error:
        expected, remedy = "a file that can be written", "Choose another place."
        raise MmkitError(f"--svg {svg}", expected, describe_error(error), remedy) from error


def _bound(info: Any, prompt: str | None, forms: Iterable[str]) -> Iterator[RenderableType]:
    """A bound spec, and a request."""
    plan: Plan = info.plan
    colours = _colours(plan.spec)
    data = parse_items(forms, plan)
    if not data and prompt is None:
        data = {name: [own.largest_item()] for name, own in plan.modalities.items()}
    ids = plan.shortest_prompt(plan.take(data)) if prompt is None else _encoded(plan, prompt)
    with convert_errors(f"{plan.spec.name}.request", "items that the processor takes", InputError):
        preview = plan.preview(ids, data)
    read = [f"{name} = {shorten(repr(value), 80)}" for name, value in _read(plan)]
    model = next(iter(info.get_hf_config().architectures or ()), "")
    yield Text.assemble((plan.spec.name, "bold"), (f"  {model}", "dim"))
    yield from _declared(plan.spec, plan, colours)
    yield Text(f"\nwith {', '.join(read)}" if read else "", "dim")
    yield from _request(ids, preview, colours, partial(_text, info.ctx.tokenizer))
    yield from _items(data, preview, colours)


def _colours(spec: Declaration) -> dict[str, str]:
    return dict(zip([m.name for m in spec.modalities], cycle(_COLOURS), strict=False))


# -- the spec --------------------------------------------------------------------------------------


def _declared(
    spec: Declaration, plan: Plan | None, colours: Mapping[str, str]
) -> Iterator[RenderableType]:
    """The parts of modalities and outputs as declared, with their values where there is a plan."""
    bound = plan.modalities if plan else {}
    parts = {m.name: _of_modality(m, bound.get(m.name)) for m in spec.modalities}
    parts |= {output.name: _of_output(output, plan) for output in spec.outputs}
    for name, rows in parts.items():
        table = _table()
        for part, declared, value in rows:
            values = Text(shorten(value, _WIDTH), colours.get(name, ""))
            table.add_row(Text(part, "dim"), Text(shorten(declared, _WIDTH)), values)
        yield from (Text(), Text(name, f"bold {colours.get(name, '')}"), table)


def _of_modality(modality: Modality, bound: BoundModality | None) -> Iterator[tuple[str, str, str]]:
    """The parts of a modality; those that need not be stated, only where they are."""
    yield "item", write_source(modality.item), repr(bound.item) if bound else ""
    yield "layout", repr(modality.layout), _layout(bound) if bound else ""
    for update in modality.update:
        yield "update", repr(update), ""
    for name, declared in modality.fields.items():
        own = bound.fields.get(name) if bound else None
        shape = "" if own is None or own.shape is None else shape_text(own.shape)
        yield f"field {name}", repr(declared), f"{shape} {own.dtype or ''}".strip() if own else ""
    yield "process", write_source(modality.process), ""
    usual = {"limit": None, "embeds": False, "cacheable": True, "positions": None, "when": True}
    for name, default in usual.items():
        if (stated := getattr(modality, name)) is not default:
            yield name, write_source(stated), str(bound.limit) if bound and name == "limit" else ""


def _of_output(output: Output, plan: Plan | None) -> Iterator[tuple[str, str, str]]:
    tokens, form = "", ""
    if plan:
        bound = plan.outputs[output.name]
        tokens = (
            f"{count_noun(bound.num_tokens, 'token')}: {' '.join(folded(map(str, bound.allowed)))}"
        )
        with suppress(MmkitError):  # of what `decode` reads, as weights, the folder may have none
            form = f"{shape_text(bound.shape)} {bound.dtype}"
    yield "layout", repr(output.layout), tokens
    yield "decode", write_source(output.decode), form
    if output.encode is not None:
        yield "encode", write_source(output.encode), ""


def _layout(bound: BoundModality) -> str:
    """A bound layout: its ids, or its formula where they depend on the item."""
    layout = bound.layout_evaluator.layout
    return " ".join(folded(map(str, layout.ids))) if isinstance(layout, Fixed) else repr(layout)


def _read(plan: Plan) -> Iterator[tuple[str, Any]]:
    """What the modalities read of the config and the Hugging Face processor."""
    read = {
        repr(dependency): (dependency, own.static)
        for own in plan.modalities.values()
        for dependency in dependencies(own.spec)
        if dependency.root in STATIC and dependency.keys
    }
    for name, (dependency, scope) in sorted(read.items()):
        with suppress(MmkitError):  # in the branch of a where() that this config does not take
            if not callable(value := evaluate(dependency.expr, scope)):
                yield name, value


# -- the request -----------------------------------------------------------------------------------


def _encoded(plan: Plan, prompt: str) -> list[int]:
    """The ids of a prompt: a text, which is tokenized as vLLM does for this spec, or ids as
    ``1,2,3``."""
    if re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", prompt):
        return [int(token) for token in prompt.split(",")]
    return plan.encode(prompt)


def _request(
    prompt: list[int], preview: Preview, colours: Mapping[str, str], text: Callable[[int], str]
) -> Iterator[RenderableType]:
    """The prompt before and after; encoder rows go to the positions in reverse."""
    expanded: list[str] = []
    cursor, ids = 0, preview.prompt_token_ids
    for at in preview.placements:
        expanded += folded(map(text, ids[cursor : at.start]))
        styles = f"underline {colours[at.modality]}", f"reverse {colours[at.modality]}"
        own = zip(at.tokens.mask, ids[at.start : at.end], strict=True)
        expanded += folded(f"[{styles[embeds]}]{text(token)}[/]" for embeds, token in own)
        cursor = at.end
    expanded += folded(map(text, ids[cursor:]))
    written = folded(map(text, prompt))
    for name, all_ids, words in (("prompt", prompt, written), ("becomes", ids, expanded)):
        yield Rule(style="dim")
        yield Text.assemble((name, "bold"), (f"  {count_noun(len(all_ids), 'token')}", "dim"))
        if len(words) > _HEAD + _TAIL:
            words = [*words[:_HEAD], "…", *words[-_TAIL:]]
        yield Padding(Text.from_markup(" ".join(words)), (0, 2))


_HEAD, _TAIL = 60, 20
"""Words that are shown of many, first and last."""


def _items(
    data: Mapping[str, Sequence[Any]], preview: Preview, colours: Mapping[str, str]
) -> Iterator[RenderableType]:
    """Where each item stands, and its part of each processed tensor."""
    table = _table()
    for at in preview.placements:
        item = describe(data[at.modality][at.index])
        label = Text(f"{at.modality}[{at.index}] · {item}", colours[at.modality])
        rows = count_noun(at.tokens.num_embeds, "row")
        own = preview.fields[at.modality][at.index].items()
        tensors = "\n".join(f"{name} {_form(value)}" for name, value in own)
        table.add_row(label, f"prompt[{at.start}:{at.end}], {rows}", Text(tensors, "dim"))
    yield from (Text(), table)


def describe(value: Any) -> str:
    """An item in a few words: ``6×3``, ``640×480``, ``8 frames of 64×64``, ``ids 5, name 3
    characters``."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {describe(part)}" for name, part in value.items())
    if isinstance(value, str):
        return count_noun(len(value), "character")
    media = getattr(value, "media", value)
    if hasattr(media, "getbands"):
        return "{}×{}".format(*media.size)
    if isinstance(media, tuple):  # samples with their rate, or frames with metadata
        return describe(media[0])
    shape = tuple(np.shape(media))
    if len(shape) == 4 and shape[-1] == 3:
        return f"{shape[0]} frames of {shape[2]}×{shape[1]}"
    return "×".join(map(str, shape)) or "a number"


def _form(value: Any) -> str:
    shape = f"{shape_text(tuple(value.shape))} " if getattr(value, "shape", ()) else ""
    return shape + str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")


def _text(tokenizer: Any, token: int) -> str:
    """The text of an id, or its number where it has none that can be read."""
    own = "" if tokenizer is None else tokenizer.convert_ids_to_tokens(token)
    text = str(own).translate(_VISIBLE)
    return escape(shorten(text, 40)) if text and text.isprintable() else str(token)


_VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", "▁": "␣", "Ġ": "␣", "Ċ": "⏎", " ": "␣"})


def _table() -> Table:
    return Table(box=None, show_header=False, padding=(0, 0, 0, 2))


# -- a long sequence in few words ------------------------------------------------------------------

_RUN, _BLOCKS = re.compile(r"(?<![^ ])([^ ]+ )\1+"), re.compile(r"(?<![^ ])((?:[^ ]+ ){2,24}?)\1+")
"""A word, or a block of words, at least twice. Longer blocks are searched in vain at a cost."""
_JOINT = "\0"
"""Stands for a space within a word."""


def folded(words: Iterable[str]) -> list[str]:
    """Words in which repetitions are told: ``31 31 7 31 31 7`` as ``(31 ×2 7) ×2``."""

    def told(match: re.Match[str]) -> str:
        block, count = match[1].rstrip(), len(match[0]) // len(match[1])
        body = f"({block})" if " " in block else block
        return f"{body} ×{count}".replace(" ", _JOINT) + " "

    text, before = "".join(f"{word.replace(' ', _JOINT)} " for word in words), ""
    text = _RUN.sub(told, text)
    while text != before:
        text, before = _BLOCKS.sub(told, text), text
    return [word.replace(_JOINT, " ") for word in text.split()]
