"""What `mmkit show` tells, and how it is drawn: for a terminal, as SVG, as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from textwrap import wrap
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..items import shape_text
from .common import brief, plural
from .formulas import Part
from .runs import Run, Runs, notation, runs

# -- facts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """What one item becomes: the item in words, the ids of its layout and how many of them receive encoder rows."""

    item: str
    tokens: int
    rows: int
    layout: list[Runs] = field(repr=False)


@dataclass(frozen=True)
class ModalityFacts:
    """One modality.

    Attributes:
        name: as declared.
        present: whether the checkpoint has it.
        parts: item, layout, updates, fields and so on.
        named: the variables of the spec's module that the parts are written with.
        values: of everything from the config, the Hugging Face processor and the vocabulary that it reads.
        smallest, largest: None without a checkpoint, or where no item of that size is taken.
    """

    name: str
    present: bool
    parts: list[Part]
    named: list[Part] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    smallest: Example | None = None
    largest: Example | None = None


@dataclass(frozen=True)
class Slice:
    """The part of a processed tensor that belongs to one item, as one would index it."""

    name: str
    index: str
    shape: tuple[int, ...] | None
    dtype: str

    def __str__(self) -> str:
        shape = f" {shape_text(self.shape)}" if self.shape else ""
        return f"{self.name}{self.index}{shape} {self.dtype}"


@dataclass(frozen=True)
class ItemFacts:
    """One item of the request: where the caller wrote it, where its layout stands, and its part of the fields."""

    modality: str
    index: int
    item: str
    written: tuple[int, int] | None
    start: int
    mask: tuple[bool, ...]
    layout: list[Runs]
    fields: list[Slice]

    @property
    def name(self) -> str:
        return f"{self.modality}[{self.index}]"

    @property
    def stop(self) -> int:
        return self.start + len(self.mask)

    @property
    def rows(self) -> int:
        """How many positions receive an encoder row."""
        return sum(self.mask)


@dataclass(frozen=True)
class RequestFacts:
    """A prompt before and after, with its items in the order in which they stand."""

    prompt: list[int]
    expanded: list[int]
    items: list[ItemFacts]


@dataclass(frozen=True)
class Shown:
    """All that `mmkit show` tells.

    Attributes:
        spec: name of the spec.
        architecture: the model class that the config names; empty without a checkpoint.
        modalities: those of the spec.
        request: None without a checkpoint.
        tokens: texts of the ids in `request`; empty without a tokenizer.
    """

    spec: str
    architecture: str
    modalities: list[ModalityFacts]
    request: RequestFacts | None = None
    tokens: dict[int, str] = field(default_factory=dict)

    def text(self, token: int) -> str:
        """A token as one reads it."""
        return self.tokens.get(token, str(token))


# -- the strip: a prompt as chips ------------------------------------------------------------------------------------


class Chip(NamedTuple):
    """A piece of a prompt as it is drawn.

    Attributes:
        text: what it says.
        kind: ``text`` of the caller, ``embed`` or ``literal`` ids of an item, what the caller has ``written`` for one,
            or a ``sign``: a bracket, or how often a block is repeated.
        item: its index among the items of the request; None for the caller's tokens.
    """

    text: str
    kind: str
    item: int | None = None


_HEAD, _TAIL, _FEW = 24, 8, 3
"""Chips that are shown of many, at the beginning and at the end; equal tokens of the caller that are shown one by one.
"""


def before(shown: Shown) -> list[Chip]:
    """The caller's prompt."""
    assert shown.request is not None
    marks = [(item.written, number) for number, item in enumerate(shown.request.items) if item.written]
    prompt = shown.request.prompt
    chips: list[Chip] = []
    cursor = 0
    for (begin, end), number in marks:
        chips += _callers(shown, prompt[cursor:begin])
        ids = prompt[begin:end]
        chips += _shortened(_item_chips(shown, runs(ids, bytes(len(ids))), number, "written"))
        cursor = end
    return chips + _callers(shown, prompt[cursor:])


def after(shown: Shown) -> list[Chip]:
    """The prompt with the layouts in it."""
    assert shown.request is not None
    chips: list[Chip] = []
    cursor = 0
    for number, item in enumerate(shown.request.items):
        chips += _callers(shown, shown.request.expanded[cursor : item.start])
        chips += _shortened(_item_chips(shown, item.layout, number))
        cursor = item.stop
    return chips + _callers(shown, shown.request.expanded[cursor:])


def _callers(shown: Shown, ids: Sequence[int]) -> list[Chip]:
    chips: list[Chip] = []
    for token, same in groupby(ids):
        count, text = sum(1 for _ in same), shown.text(token)
        chips += [Chip(_times(text, count), "text")] if count > _FEW else [Chip(text, "text")] * count
    return _shortened(chips)


def _shortened(chips: list[Chip]) -> list[Chip]:
    """The first and the last of many chips."""
    hidden = len(chips) - _HEAD - _TAIL
    if hidden <= 1:
        return chips
    return [*chips[:_HEAD], Chip(f"… {hidden} more …", "sign", chips[_HEAD].item), *chips[-_TAIL:]]


def _item_chips(shown: Shown, found: Sequence[Runs], item: int, kind: str = "") -> list[Chip]:
    chips: list[Chip] = []
    for run in found:
        if isinstance(run, Run):
            chips.append(Chip(_times(shown.text(run.token), run.count), kind or _kind(run), item))
        else:
            inner = _item_chips(shown, run.body, item, kind)
            chips += [Chip("(", "sign", item), *inner, Chip(f") ×{run.count}", "sign", item)]
    return chips


def _kind(run: Run) -> str:
    return "embed" if run.embeds else "literal"


def _times(text: str, count: int) -> str:
    return text if count == 1 else f"{text} ×{count}"


def _colour(shown: Shown, number: int | None, count: int) -> int:
    """The index of an item's colour: that of its modality."""
    if number is None or shown.request is None:
        return 0
    names = [modality.name for modality in shown.modalities]
    return names.index(shown.request.items[number].modality) % count


def _lines(modality: ModalityFacts) -> list[Part]:
    """What there is to tell of a modality, line by line."""
    examples = {"smallest": modality.smallest, "largest": modality.largest}
    if modality.smallest and modality.largest and modality.smallest.layout == modality.largest.layout:
        examples = {"every item": modality.largest}
    told = [Part(name, made.item, _became(made)) for name, made in examples.items() if made]
    named = [Part(name, f"= {formula}", f"= {value}" if value else "") for name, formula, value in modality.named]
    return [*modality.parts, *named, *told]


def _became(example: Example) -> str:
    return f"{notation(example.layout)}: {plural(example.tokens, 'token')}, {plural(example.rows, 'row')}"


_UNBROKEN = 60  # letters of what stands on one line


def _assignments(modality: ModalityFacts) -> str:
    """The values, with no-break spaces inside the short ones."""
    told = (f"{name} = {brief(repr(value), 80)}" for name, value in modality.values.items())
    return ", ".join(_unbroken(text) if len(text) < _UNBROKEN else text for text in told)


def _unbroken(text: str) -> str:
    """A text that stays on one line: its spaces do not break."""
    return text.replace(" ", "\u00a0")


def _item_line(item: ItemFacts) -> tuple[str, str, str]:
    place = f"prompt[{item.start}:{item.stop}]"
    rows = plural(item.rows, "row")
    if item.rows < len(item.mask):
        rows += f" in {len(item.mask)} positions"
    return f"{item.name} · {item.item}", f"{place}, {rows}", " · ".join(map(str, item.fields))


# -- the terminal ----------------------------------------------------------------------------------------------------

_TERMINAL = ("blue", "magenta", "green", "cyan")
_VALUE_WIDTH, _FORMULA_WIDTH = 120, 200


def to_rich(shown: Shown) -> RenderableType:
    """For a terminal, light or dark."""
    title = Text(shown.spec, style="bold")
    if shown.architecture:
        title.append(f"  {shown.architecture}", style="dim")
    made: list[RenderableType] = [title]
    for number, modality in enumerate(shown.modalities):
        made += [Text(), *_rich_modality(modality, _TERMINAL[number % len(_TERMINAL)])]
    if shown.request:
        made += [Text(), *_rich_request(shown)]
    return Group(*made)


def _rich_modality(modality: ModalityFacts, colour: str) -> Iterator[RenderableType]:
    name = Text(modality.name, style=f"bold {colour}")
    if not modality.present:
        name.append("  not in this checkpoint", style="dim")
    yield name
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for part in _lines(modality):
        value = Text(brief(part.value, _VALUE_WIDTH), style=colour)
        table.add_row(Text(part.name, style="dim"), Text(brief(part.formula, _FORMULA_WIDTH)), value)
    yield table
    if modality.values:
        yield Padding(Text(f"with {_assignments(modality)}", style="dim"), (0, 2))


def _rich_request(shown: Shown) -> Iterator[RenderableType]:
    assert shown.request is not None
    for name, ids, chips in _strips(shown):
        yield Text.assemble((name, "bold"), (f"  {plural(len(ids), 'token')}", "dim"))
        yield Padding(_rich_strip(shown, chips), (0, 2, 1, 2))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for number, item in enumerate(shown.request.items):
        name, place, fields = _item_line(item)
        table.add_row(Text(name, style=_TERMINAL[_colour(shown, number, len(_TERMINAL))]), place, Text(fields))
    yield table


def _strips(shown: Shown) -> Iterator[tuple[str, list[int], list[Chip]]]:
    assert shown.request is not None
    yield "prompt", shown.request.prompt, before(shown)
    yield "becomes", shown.request.expanded, after(shown)


def _rich_strip(shown: Shown, chips: Sequence[Chip]) -> Text:
    line = Text()
    for chip in chips:
        colour = _TERMINAL[_colour(shown, chip.item, len(_TERMINAL))]
        style = {
            "text": "",
            "sign": "dim" if chip.item is None else colour,
            "embed": f"reverse {colour}",  # reverse of a terminal's own colours suits its background
            "literal": f"underline {colour}",
            "written": f"bold {colour}",
        }[chip.kind]
        text = _unbroken(chip.text)
        line.append(f"\u00a0{text}\u00a0" if chip.kind == "embed" else text, style=style)
        line.append(" ")
    return line


# -- SVG -------------------------------------------------------------------------------------------------------------

_WIDTH, _MARGIN, _SIZE, _ADVANCE = 960, 24, 13, 8.05
"""Pixels: of the picture, at its sides, of the letters, and from one to the next in the widest of the fonts."""
_LABELS, _VALUES = (9, 26), 44
"""Letters of the column of labels, at least and at most, and of that of values."""
_LINE, _LEADING, _CHIP = 20, 17, 24
"""From row to row, from line to line within a row, and from chip to chip."""
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class _Theme:
    paper: str
    line: str
    ink: str
    faint: str
    chip: str
    on: str
    colours: tuple[str, ...]

    def css(self) -> str:
        rules = [
            f".paper{{fill:{self.paper};stroke:{self.line}}}.ink{{fill:{self.ink}}}.faint{{fill:{self.faint}}}"
            f".chip{{fill:{self.chip}}}.on{{fill:{self.on}}}.rule{{stroke:{self.line}}}"
        ]
        for number, colour in enumerate(self.colours):
            rules.append(f".f{number}{{fill:{colour}}}.s{number}{{fill:none;stroke:{colour}}}")
        return "".join(rules)


_LIGHT = _Theme(
    "#ffffff", "#d1d9e0", "#1f2328", "#656d76", "#eaeef2", "#ffffff", ("#0969da", "#8250df", "#1a7f37", "#bc4c00")
)
_DARK = _Theme(
    "#0d1117", "#3d444d", "#e6edf3", "#9198a1", "#262c36", "#0d1117", ("#58a6ff", "#bc8cff", "#3fb950", "#f0883e")
)


class _Drawing:
    """An SVG that grows downwards."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 0.0

    def text(self, x: float, text: str, style: str, *, y: float = 0, extra: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{self.y + y:g}" class="{style}"{extra}>{escape(text)}</text>')

    def box(self, x: float, width: float, style: str) -> None:
        size = f'width="{width:g}" height="{_CHIP - 2}" rx="4"'
        self.parts.append(f'<rect x="{x:g}" y="{self.y:g}" {size} class="{style}"/>')

    def line(self, begin: float, end: float, y: float, style: str) -> None:
        self.parts.append(f'<path d="M{begin:g} {self.y + y:g}H{end:g}" class="{style}"/>')

    def svg(self, title: str) -> str:
        height = self.y
        style = (
            f"text{{font:{_SIZE}px {_FONT}}}.b{{font-weight:600}}.small{{font-size:11px}}.dash{{stroke-dasharray:3 2}}"
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" '
            f'height="{height:g}" role="img">\n<title>{escape(title)}</title>\n<style>{style}{_LIGHT.css()}'
            f"@media (prefers-color-scheme: dark){{{_DARK.css()}}}</style>\n"
            f'<rect x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1:g}" rx="8" class="paper"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def to_svg(shown: Shown) -> str:
    """A picture for light and dark pages: it follows `prefers-color-scheme`."""
    drawing = _Drawing()
    drawing.y = 34
    drawing.text(_MARGIN, shown.spec, "ink b", extra=' style="font-size:16px"')
    drawing.text(_MARGIN + 10 * len(shown.spec) + 14, shown.architecture, "faint")
    for number, modality in enumerate(shown.modalities):
        _draw_modality(drawing, modality, number % len(_LIGHT.colours))
    if shown.request:
        for name, ids, chips in _strips(shown):
            _draw_strip(drawing, shown, f"{name} · {plural(len(ids), 'token')}", chips)
        _draw_items(drawing, shown)
        _draw_legend(drawing, shown)
    drawing.y += 14
    return drawing.svg(f"{shown.spec}: the spec, and what becomes of a prompt")


def _draw_modality(drawing: _Drawing, modality: ModalityFacts, colour: int) -> None:
    drawing.y += 30
    drawing.text(_MARGIN, modality.name, f"f{colour} b")
    if not modality.present:
        drawing.text(_MARGIN + _ADVANCE * (len(modality.name) + 2), "not in this checkpoint", "faint")
        return
    least, most = _LABELS
    lines = [part._replace(name=brief(part.name, most)) for part in _lines(modality)]
    begin = _MARGIN + _ADVANCE * (max(least, *(len(part.name) for part in lines)) + 2)
    end, middle = _WIDTH - _MARGIN, _WIDTH - _MARGIN - _ADVANCE * _VALUES
    for part in lines:
        formula = _lined(brief(part.formula, 180), begin, middle - _ADVANCE if part.value else end)
        value = _lined(brief(part.value, 120), middle, end)
        _draw_row(drawing, part.name, (begin, formula, "ink"), (middle, value, f"f{colour}"))
    if modality.values:
        _draw_row(drawing, "with", (begin, _lined(_assignments(modality), begin, end), "faint"))


def _draw_row(drawing: _Drawing, label: str, *columns: tuple[float, list[str], str]) -> None:
    drawing.y += _LINE
    drawing.text(_MARGIN, label, "faint")
    for x, lines, style in columns:
        for number, line in enumerate(filter(None, lines)):
            drawing.text(x, line, style, y=_LEADING * number)
    drawing.y += _LEADING * (max(len(lines) for _, lines, _ in columns) - 1)


def _lined(text: str, begin: float, end: float) -> list[str]:
    return wrap(text, int((end - begin) / _ADVANCE)) or [""]


def _draw_strip(drawing: _Drawing, shown: Shown, title: str, chips: Sequence[Chip]) -> None:
    drawing.y += 34
    drawing.line(_MARGIN, _WIDTH - _MARGIN, -18, "rule")
    drawing.text(_MARGIN, title, "faint")
    drawing.y += 10
    x = float(_MARGIN)
    spans: dict[int, tuple[float, float]] = {}
    labelled: set[int] = set()
    for chip in chips:
        width = len(chip.text) * _ADVANCE + (4 if chip.kind == "sign" else 14)
        if x + width > _WIDTH - _MARGIN and x > _MARGIN:
            _draw_spans(drawing, shown, spans, labelled)
            drawing.y += _CHIP + 4
            x = _MARGIN
        _draw_chip(drawing, chip, x, width, _colour(shown, chip.item, len(_LIGHT.colours)))
        if chip.item is not None and chip.kind != "written":
            spans[chip.item] = spans.get(chip.item, (x, x))[0], x + width
        x += width + 4
    _draw_spans(drawing, shown, spans, labelled)
    drawing.y += _CHIP


def _draw_chip(drawing: _Drawing, chip: Chip, x: float, width: float, colour: int) -> None:
    box, ink = {
        "text": ("chip", "ink"),
        "embed": (f"f{colour}", "on"),
        "literal": (f"s{colour}", f"f{colour}"),
        "written": (f"s{colour} dash", f"f{colour}"),
        "sign": ("", "faint" if chip.item is None else f"f{colour}"),
    }[chip.kind]
    if box:
        drawing.box(x, width, box)
    drawing.text(x + width / 2, chip.text, ink, y=15.5, extra=' text-anchor="middle"')


def _draw_spans(drawing: _Drawing, shown: Shown, spans: dict[int, tuple[float, float]], labelled: set[int]) -> None:
    """A line under each item's chips, with its name where that fits and stands nowhere yet."""
    assert shown.request is not None
    drawn = False
    for number, (begin, end) in spans.items():
        colour = _colour(shown, number, len(_LIGHT.colours))
        drawing.line(begin, end, _CHIP + 2.5, f"s{colour}")
        item = shown.request.items[number]
        names = (f"{item.name} prompt[{item.start}:{item.stop}]", item.name, f"[{item.index}]")
        label = next((name for name in names if len(name) * 6.7 <= end - begin), "")
        if label and number not in labelled:
            drawing.text(begin, label, f"f{colour} small", y=_CHIP + 15)
            labelled.add(number)
            drawn = True
    drawing.y += 18 * drawn
    spans.clear()


def _draw_items(drawing: _Drawing, shown: Shown) -> None:
    assert shown.request is not None
    lines = [_item_line(item) for item in shown.request.items]
    if not lines:
        return
    drawing.y += 8
    place_x = _MARGIN + _ADVANCE * (max(len(name) for name, _, _ in lines) + 2)
    tensors_x = place_x + _ADVANCE * (max(len(place) for _, place, _ in lines) + 2)
    for number, (name, place, tensors) in enumerate(lines):
        drawing.y += _LINE
        drawing.text(_MARGIN, name, f"f{_colour(shown, number, len(_LIGHT.colours))}")
        drawing.text(place_x, place, "ink")
        wrapped = _lined(_unbroken(tensors).replace("\u00a0·\u00a0", " · "), tensors_x, _WIDTH - _MARGIN)
        for count, line in enumerate(wrapped):
            drawing.text(tensors_x, line, "faint", y=_LEADING * count)
        drawing.y += _LEADING * (len(wrapped) - 1)


_LEGEND = {
    "f0": "takes an encoder row",
    "s0": "literal id",
    "s0 dash": "written for an item",
    "chip": "the caller's",
}


def _draw_legend(drawing: _Drawing, shown: Shown) -> None:
    drawing.y += 22
    x = float(_MARGIN)
    for box, text in _LEGEND.items():
        drawing.box(x, 22, box)
        drawing.text(x + 30, text, "faint", y=15.5)
        x += 30 + _ADVANCE * len(text) + 24
    drawing.y += _CHIP


def to_html(shown: Shown) -> str:
    """The picture as a page of its own."""
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(shown.spec)}</title>\n'
        "<style>:root{color-scheme:light dark}body{margin:2rem}svg{max-width:100%;height:auto}</style>\n"
        f"{to_svg(shown)}</html>\n"
    )
