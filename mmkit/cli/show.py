"""``mmkit show``: a spec with its values for one checkpoint, and a prompt before and after."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from io import StringIO
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..bound.calls import Taken
from ..bound.modality import BoundModality
from ..errors import InputError, MmkitError
from ..expr import STATIC, Scope, evaluate, leaves, same
from ..items import ItemType, shape_text
from ..layout import Fixed
from ..model_spec import ModelSpec
from ..outputs import Output
from ..plan import Plan
from ..spec import Modality
from ..updates import Insert
from .common import UsageError, brief, open_checkpoint, plural, reason, write
from .forms import describe, parse_items

# -- facts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One part of a declaration: as declared, and its value for the checkpoint, empty where there
    is none to tell."""

    name: str
    declared: str
    value: str = ""


@dataclass(frozen=True)
class ItemFacts:
    """One item of the request.

    Attributes:
        modality, index: which one.
        item: in words.
        start: where its layout begins in the expanded prompt.
        mask: for each position of it 1 if it receives an encoder row, else 0.
        fields: its part of each processed tensor: name, shape and dtype.
    """

    modality: str
    index: int
    item: str
    start: int
    mask: list[int]
    fields: list[str]


@dataclass(frozen=True)
class Shown:
    """All that `mmkit show` tells.

    Attributes:
        spec: name of the spec.
        architecture: the model class that the config names; empty without a checkpoint.
        parts: of each modality and output, by its name.
        read: what the declarations read of the config and the Hugging Face processor.
        prompt, expanded: ids of a request before and after; None without a checkpoint.
        items: those of the request, in the order in which they stand.
        tokens: texts of these ids; empty without a tokenizer.
    """

    spec: str
    architecture: str
    parts: dict[str, list[Part]]
    read: dict[str, Any] = field(default_factory=dict)
    prompt: list[int] | None = None
    expanded: list[int] = field(default_factory=list)
    items: list[ItemFacts] = field(default_factory=list)
    tokens: dict[int, str] = field(default_factory=dict)


def show(
    spec: ModelSpec,
    folder: str | Path | None = None,
    *,
    prompt: str | None = None,
    items: Iterable[str] = (),
    trust_remote_code: bool = False,
) -> Shown:
    """Collect the facts about a spec.

    Args:
        spec: the declaration.
        folder: folder of a checkpoint, for values and a request; it needs no weights, and no
            engine is started.
        prompt: a text, or ids in the form ``1,2,3``; None for what a caller writes for the items.
        items: the items of the request, for example ``image=640x480``; see `parse_item`. Without
            items and prompt, the largest item of each modality is shown.
        trust_remote_code: run code that the checkpoint brings.

    Raises:
        SpecError: the spec does not fit the checkpoint.
        InputError: vLLM's path would refuse the request.
        UsageError: the folder or an item cannot be read.
    """
    forms = list(items)
    if folder is None:
        if prompt is not None or forms:
            got, remedy = "none beside --prompt or --item", "A request wants a config."
            raise UsageError("--config", "the folder of a checkpoint", got, remedy)
        return Shown(spec.name, "", _parts_of(spec))
    opened = open_checkpoint(spec, folder, trust_remote_code=trust_remote_code)
    plan = opened.plan
    data = parse_items(forms, plan) if forms or prompt is not None else _largest(plan)
    ids = _spelled(plan, data) if prompt is None else _encoded(plan, prompt)
    expanded, placed = _request(plan, ids, data)
    tokens = _texts(opened.info.ctx.tokenizer, {*ids, *expanded})
    parts, read = _parts_of(spec, plan), _read(spec, opened.scope)
    return Shown(spec.name, opened.architecture, parts, read, ids, expanded, placed, tokens)


def _parts_of(spec: ModelSpec, plan: Plan | None = None) -> dict[str, list[Part]]:
    bound = plan.modalities if plan else {}
    parts = {m.name: _of_modality(m, bound.get(m.name)) for m in spec.modalities}
    return parts | {output.name: _of_output(output, plan) for output in spec.outputs}


def _of_modality(modality: Modality, bound: BoundModality | None) -> list[Part]:
    """The parts of a modality; those that need not be stated, only where they are."""
    parts = [
        Part("item", _source(modality.item), bound.item.describe() if bound else ""),
        Part("layout", repr(modality.layout), _layout(bound) if bound else ""),
        *(Part("update", repr(update)) for update in modality.update),
    ]
    for name, declared in modality.fields.items():
        parts.append(Part(f"field {name}", repr(declared), _form(bound, name) if bound else ""))
    parts.append(Part("process", _source(modality.process)))
    usual = {"limit": None, "embeds": False, "cacheable": True, "positions": None, "when": True}
    for name, default in usual.items():
        if (stated := getattr(modality, name)) is not default:
            value = str(bound.limit) if bound and name == "limit" else ""
            parts.append(Part(name, _source(stated), value))
    return parts


def _of_output(output: Output, plan: Plan | None) -> list[Part]:
    tokens, form = "", ""
    if plan:
        bound = plan.outputs[output.name]
        tokens = f"{plural(bound.num_tokens, 'token')}: {_in_few(map(str, bound.allowed))}"
        with suppress(MmkitError):  # of what `decode` reads, as weights, the folder may have none
            form = f"{shape_text(bound.shape)} {bound.dtype}"
    parts = [
        Part("layout", repr(output.layout), tokens),
        Part("decode", _source(output.decode), form),
    ]
    return parts if output.encode is None else [*parts, Part("encode", _source(output.encode))]


def _source(part: Any) -> str:
    """A part as one would write it: an item type without what it has by default."""
    if not isinstance(part, ItemType) or not is_dataclass(part) or part.part_names:
        return getattr(part, "__qualname__", repr(part))
    stated = [(f, getattr(part, f.name)) for f in fields(part)]
    options = [f"{f.name}={value!r}" for f, value in stated if not same(value, f.default)]
    return f"{type(part).__name__}({', '.join(options)})"


def _layout(bound: BoundModality) -> str:
    """A bound layout: its ids, or its formula where they depend on the item."""
    layout = bound.placeholders.layout
    return _in_few(map(str, layout.ids)) if isinstance(layout, Fixed) else repr(layout)


def _form(bound: BoundModality, name: str) -> str:
    """Shape and dtype of a bound field, as far as they are declared."""
    if (own := bound.fields.get(name)) is None:  # the model does not receive it
        return ""
    shape = "" if own.shape is None else shape_text(own.shape)
    return f"{shape} {own.dtype or ''}".strip()


def _read(spec: ModelSpec, scope: Scope) -> dict[str, Any]:
    """What the declarations read of the config and the Hugging Face processor."""
    known = {leaf for leaf in leaves(spec.modalities) if leaf.root in STATIC and leaf.keys}
    values = {}
    for leaf in sorted(known, key=repr):
        with suppress(MmkitError):  # in the branch of a where() that this config does not take
            values[repr(leaf)] = evaluate(leaf.expr, scope)
    return {name: value for name, value in values.items() if not callable(value)}


def _texts(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """The texts of ids; ids without a readable text are left out."""
    if tokenizer is None:
        return {}
    texts = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(ids)}
    shown = {token: brief(text.translate(_VISIBLE), 40) for token, text in texts.items()}
    return {token: text for token, text in shown.items() if text.isprintable()}


_VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", "▁": "␣", "Ġ": "␣", "Ċ": "⏎", " ": "␣"})


# -- the request -----------------------------------------------------------------------------------


def _largest(plan: Plan) -> dict[str, list[Any]]:
    """The item with the most encoder rows, of each modality."""
    return {name: [own.largest_item(_process(plan, name))] for name, own in plan.modalities.items()}


def _process(plan: Plan, name: str) -> Any:
    """A function from a canonical item of a modality to its processed fields."""
    return lambda value: plan.process({name: Taken([value], embeds=False, total=1)})[name][0]


def _spelled(plan: Plan, data: Mapping[str, Sequence[Any]]) -> list[int]:
    """The ids that a caller writes for some items."""
    prompt: list[int] = []
    for name, values in data.items():
        own = plan.modalities[name]
        for index, value in enumerate(values):
            canonical = own.item.canonical(value, f"{own.where}[{index}]")
            update, target, written = own.written(canonical, index, _process(plan, name))
            if isinstance(update, Insert) and plan.rewrite("prompt", [])[: len(target)] != [
                *target
            ]:
                prompt = [*target, *prompt]  # the prefix that the layout follows
            prompt += written
    return prompt


def _encoded(plan: Plan, prompt: str) -> list[int]:
    """The ids of a prompt: a text, which is tokenized as vLLM does for this spec, or ids as
    ``1,2,3``."""
    if re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", prompt):
        return [int(token) for token in prompt.split(",")]
    return plan.encode(prompt)


def _request(
    plan: Plan, prompt: list[int], data: Mapping[str, list[Any]]
) -> tuple[list[int], list[ItemFacts]]:
    """The expanded prompt, and the items where they stand in it."""
    if not data:
        plan.check_ids(prompt)
        plan.check_bare(prompt)
        return plan.rewrite("prompt", prompt), []
    try:
        preview = plan.preview(prompt, data)
    except MmkitError:
        raise
    except Exception as error:
        where, expected = f"{plan.spec.name}.request", "items that the processor takes"
        raise InputError(where, expected, reason(error)) from error
    items = []
    for at in preview.placements:
        item, mask = describe(data[at.modality][at.index]), list(at.placeholder.mask)
        own = [_tensor(*part) for part in preview.fields[at.modality][at.index].items()]
        items.append(ItemFacts(at.modality, at.index, item, at.start, mask, own))
    return preview.prompt_token_ids, items


def _tensor(name: str, value: Any) -> str:
    shape = f" {shape_text(tuple(value.shape))}" if getattr(value, "shape", ()) else ""
    dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
    return f"{name}{shape} {dtype}"


# -- a long sequence in few words ------------------------------------------------------------------

_LONGEST_BLOCK = 24
"""The words of one row or tile; longer periods are searched in vain at a cost."""


def folded(words: Iterable[str]) -> list[str]:
    """Words in which repetitions are told: ``31 31 7 31 31 7`` as ``(31 ×2 7) ×2``."""
    runs = [_times([word], sum(1 for _ in same)) for word, same in groupby(words)]
    return _blocks([word for run in runs for word in run])


def _blocks(words: list[str]) -> list[str]:
    short: list[str] = []
    at = 0
    while at < len(words):
        length, count = _repetition(words, at)
        body = words[at : at + length]
        short += _times(_blocks(body), count) if count > 1 else body
        at += length * count
    return short if short == words else _blocks(short)


def _times(body: list[str], count: int) -> list[str]:
    if count == 1:
        return body
    text = body[0] if len(body) == 1 else f"({' '.join(body)})"
    return [f"{text} ×{count}"]


def _repetition(words: list[str], start: int) -> tuple[int, int]:
    """Length of the block that starts here and covers most by repetition, and how often it stands
    there."""
    best = 1, 1
    for length in range(1, min(_LONGEST_BLOCK, (len(words) - start) // 2) + 1):
        block, count = words[start : start + length], 1
        while words[(at := start + count * length) : at + length] == block:
            count += 1
        if count > 1 and length * count > best[0] * best[1]:
            best = length, count
    return best


def _in_few(words: Iterable[str]) -> str:
    return " ".join(folded(words))


# -- the terminal ----------------------------------------------------------------------------------

_COLOURS = ("blue", "magenta", "green", "cyan")
_WIDTH = 180
_HEAD, _TAIL = 60, 20
"""Words that are shown of many, first and last."""


def to_rich(shown: Shown) -> RenderableType:
    """For a terminal, light or dark. Encoder rows go to the positions in reverse."""
    colours = dict(zip(shown.parts, cycle(_COLOURS), strict=False))
    blocks: list[RenderableType] = [
        Text.assemble((shown.spec, "bold"), (f"  {shown.architecture}", "dim"))
    ]
    for name, parts in shown.parts.items():
        table = _table()
        for part in parts:
            cells = brief(part.declared, _WIDTH), brief(part.value, _WIDTH)
            table.add_row(Text(part.name, "dim"), Text(cells[0]), Text(cells[1], colours[name]))
        blocks += [Text(), Text(name, f"bold {colours[name]}"), table]
    if shown.read:
        values = [f"{name} = {brief(repr(value), 80)}" for name, value in shown.read.items()]
        blocks += [Text(), Text(f"with {', '.join(values)}", "dim")]
    return Group(*blocks, *_of_request(shown, colours))


def _of_request(shown: Shown, colours: Mapping[str, str]) -> Iterator[RenderableType]:
    if shown.prompt is None:
        return
    after: list[str] = []
    cursor = 0
    for item in shown.items:
        after += folded(_words(shown, shown.expanded[cursor : item.start]))
        cursor = item.start + len(item.mask)
        own = zip(item.mask, _words(shown, shown.expanded[item.start : cursor]), strict=True)
        styles = f"underline {colours[item.modality]}", f"reverse {colours[item.modality]}"
        after += folded(f"[{styles[embeds]}]{word}[/]" for embeds, word in own)
    after += folded(_words(shown, shown.expanded[cursor:]))
    before = folded(_words(shown, shown.prompt))
    for name, ids, words in (
        ("prompt", shown.prompt, before),
        ("becomes", shown.expanded, after),
    ):
        yield Rule(style="dim")
        yield Text.assemble((name, "bold"), (f"  {plural(len(ids), 'token')}", "dim"))
        if len(words) > _HEAD + _TAIL:
            words = [*words[:_HEAD], "…", *words[-_TAIL:]]
        yield Padding(Text.from_markup(" ".join(words)), (0, 2))
    table = _table()
    for item in shown.items:
        label = Text(f"{item.modality}[{item.index}] · {item.item}", colours[item.modality])
        place = (
            f"prompt[{item.start}:{item.start + len(item.mask)}], {plural(sum(item.mask), 'row')}"
        )
        table.add_row(label, place, Text("\n".join(item.fields), "dim"))
    yield from (Text(), table)


def _words(shown: Shown, ids: Sequence[int]) -> list[str]:
    return [escape(shown.tokens.get(token, str(token))) for token in ids]


def _table() -> Table:
    return Table(box=None, show_header=False, padding=(0, 0, 0, 2))


# -- the command -----------------------------------------------------------------------------------


def to_json(shown: Shown) -> str:
    """All facts."""
    return json.dumps(asdict(shown), indent=2, ensure_ascii=False, default=str) + "\n"


def to_svg(shown: Shown) -> str:
    """The output of a terminal as a picture."""
    console = Console(width=110, file=StringIO(), record=True, force_terminal=True)
    console.print(to_rich(shown))
    svg = console.export_svg(title=f"mmkit show {shown.spec}")
    return re.sub(r"(?s)\s*@font-face \{.*?\}", "", svg)  # which would be fetched from elsewhere


def run(
    spec: ModelSpec,
    folder: str | Path | None = None,
    *,
    svg: str | None = None,
    json: str | None = None,
    **request: Any,
) -> None:
    """Print what there is to show, or write it to the files that are named; ``-`` is standard
    output. `request` has the other arguments of `show`."""
    shown = show(spec, folder, **request)
    if svg is None and json is None:
        Console().print(to_rich(shown))
    for name, option, to_text in ((svg, "--svg", to_svg), (json, "--json", to_json)):
        if name == "-":
            sys.stdout.write(to_text(shown))
        elif name is not None:
            write(name, to_text(shown), option)
