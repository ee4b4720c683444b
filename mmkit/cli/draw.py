"""The facts of `mmkit show`, drawn for a terminal, and the same lines as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from itertools import cycle, groupby
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from .common import brief, plural
from .formulas import Part
from .runs import Run, Runs, notation, runs

# -- facts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """One item in the prompt: the item in words, the ids of its layout, the number of them that
    receive encoder rows."""

    item: str
    tokens: int
    rows: int
    layout: str

    def __str__(self) -> str:
        return f"{self.layout}: {plural(self.tokens, 'token')}, {plural(self.rows, 'row')}"


@dataclass(frozen=True)
class ModalityFacts:
    """One modality.

    Attributes:
        name: as declared.
        present: whether the checkpoint has it.
        parts: item, layout, updates, fields and so on.
        named: the variables of the spec's module that the parts are written with.
        values: of everything from the config, the Hugging Face processor and the vocabulary that it
            reads.
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
class OutputFacts:
    """One output: its name, its parts as declared, and the variables that these are written
    with."""

    name: str
    parts: list[Part]
    named: list[Part]


@dataclass(frozen=True)
class ItemFacts:
    """One item of the request.

    Attributes:
        modality, index: which one.
        item: in words.
        written: where the caller wrote it in the prompt; None where it is inserted.
        start, stop: where its layout stands in the expanded prompt.
        rows: how many of these positions receive an encoder row.
        layout: their ids.
        fields: its part of each processed tensor, as one would index it, with shape and dtype.
    """

    modality: str
    index: int
    item: str
    written: tuple[int, int] | None
    start: int
    stop: int
    rows: int
    layout: list[Runs]
    fields: list[str]


@dataclass(frozen=True)
class Shown:
    """All that `mmkit show` tells.

    Attributes:
        spec: name of the spec.
        architecture: the model class that the config names; empty without a checkpoint.
        modalities: those of the spec.
        prompt, expanded: ids of a request before and after; None without a checkpoint.
        items: those of the request, in the order in which they stand.
        tokens: texts of these ids; empty without a tokenizer.
        outputs: those of the spec.
    """

    spec: str
    architecture: str
    modalities: list[ModalityFacts]
    prompt: list[int] | None = None
    expanded: list[int] = field(default_factory=list)
    items: list[ItemFacts] = field(default_factory=list)
    tokens: dict[int, str] = field(default_factory=dict)
    outputs: list[OutputFacts] = field(default_factory=list)

    def text(self, token: int) -> str:
        """A token as one reads it."""
        return self.tokens.get(token, str(token))

    @property
    def colours(self) -> dict[str, str]:
        """Each modality's."""
        names = [modality.name for modality in self.modalities]
        return dict(zip(names, cycle(_COLOURS), strict=False))


# -- the terminal ----------------------------------------------------------------------------------

_COLOURS = ("blue", "magenta", "green", "cyan")
_VALUE_WIDTH, _FORMULA_WIDTH = 120, 180


def to_rich(shown: Shown, *, boxes: bool = False) -> RenderableType:
    """For a terminal, light or dark; with room for boxes around tokens, for `to_svg`."""
    title = Text.assemble((shown.spec, "bold"), (f"  {shown.architecture}", "dim"))
    blocks: list[RenderableType] = [title]
    for modality in shown.modalities:
        blocks += [Text(), *_modality(modality, shown.colours[modality.name])]
    for output in shown.outputs:
        heading = Text.assemble((output.name, "bold"), ("  comes out", "dim"))
        blocks += [Text(), heading, _parts([*output.parts, *_equations(output.named)], "")]
    if shown.prompt is not None:
        blocks += _request(shown, shown.prompt, boxes)
    return Group(*blocks)


def _modality(modality: ModalityFacts, colour: str) -> Iterator[RenderableType]:
    absent = "" if modality.present else "  not in this checkpoint"
    yield Text.assemble((modality.name, f"bold {colour}"), (absent, "dim"))
    yield _parts(_lines(modality), colour)
    if modality.values:
        values = [f"{name} = {brief(repr(value), 80)}" for name, value in modality.values.items()]
        yield Padding(Text(f"with {', '.join(values)}", style="dim"), (0, 2))


def _parts(parts: Sequence[Part], colour: str) -> Table:
    """Parts as declared, with their values."""
    table = _table()
    for part in parts:
        value = Text(brief(part.value, _VALUE_WIDTH), style=colour)
        formula = Text(brief(part.formula, _FORMULA_WIDTH))
        table.add_row(Text(part.name, style="dim"), formula, value)
    return table


def _equations(variables: Sequence[Part]) -> list[Part]:
    """The values of variables."""
    return [
        Part(part.name, f"= {part.formula}", f"= {part.value}" if part.value else "")
        for part in variables
    ]


def _lines(modality: ModalityFacts) -> list[Part]:
    """The facts of a modality, line by line."""
    small, large = modality.smallest, modality.largest
    examples = {"smallest": small, "largest": large}
    if small and large and small.layout == large.layout:
        examples = {"every item": large}
    sizes = [Part(name, one.item, str(one)) for name, one in examples.items() if one]
    return [*modality.parts, *_equations(modality.named), *sizes]


def _request(shown: Shown, prompt: list[int], boxes: bool) -> Iterator[RenderableType]:
    before, after = [], []
    for item in shown.items:
        colour = shown.colours[item.modality]
        after.append(_Span(item.start, item.stop, item.layout, colour))
        if item.written:
            ids = prompt[slice(*item.written)]
            before.append(_Span(*item.written, runs(ids, bytes(len(ids))), colour, "written"))
    for name, ids, spans in (("prompt", prompt, before), ("becomes", shown.expanded, after)):
        yield Rule(style="dim")
        yield Text.assemble((name, "bold"), (f"  {plural(len(ids), 'token')}", "dim"))
        yield Padding(_Strip(_chips(shown, ids, spans), boxes), (0, 2))
    table = _table()
    for item in shown.items:
        rows = plural(item.rows, "row")
        if item.rows < item.stop - item.start:
            rows += f" in {item.stop - item.start} positions"
        label = Text(f"{item.modality}[{item.index}] · {item.item}", shown.colours[item.modality])
        place = f"prompt[{item.start}:{item.stop}], {rows}"
        table.add_row(label, place, Text("\n".join(item.fields), "dim"))
    yield from (Text(), table)
    if boxes:
        yield from (Text(), Padding(_Strip(_LEGEND, boxes), (0, 2)))


def _table() -> Table:
    return Table(box=None, show_header=False, padding=(0, 0, 0, 2))


# -- a prompt as chips -----------------------------------------------------------------------------


class _Chip(NamedTuple):
    """A piece of a prompt: ``text`` of the caller, ``embed`` or ``literal`` ids of an item, what
    the caller has ``written`` for one, or a ``sign``: a bracket, or how often a block is
    repeated."""

    text: str
    kind: str
    colour: str = ""


class _Span(NamedTuple):
    """The ids of one item; of a `kind`, or of that which each run has."""

    start: int
    stop: int
    layout: Sequence[Runs]
    colour: str = ""
    kind: str = ""


_HEAD, _TAIL, _FEW = 24, 8, 3
"""Chips that are shown of many, first and last; equal tokens of the caller that are shown one by
one."""

_STYLES = {"text": "", "sign": "", "embed": "reverse", "literal": "underline", "written": "bold"}
"""In a terminal; reverse of a terminal's own colours suits its background."""

_LEGEND = [
    _Chip("takes an encoder row", "embed", _COLOURS[0]),
    _Chip("literal id", "literal", _COLOURS[0]),
    _Chip("written for an item", "written", _COLOURS[0]),
    _Chip("the caller's", "text"),
]


def _chips(shown: Shown, ids: list[int], spans: Sequence[_Span]) -> list[_Chip]:
    """Ids of a prompt, those of items as their layouts have them."""
    chips: list[_Chip] = []
    cursor = 0
    for span in [*spans, _Span(len(ids), len(ids), [])]:
        own: list[_Chip] = []
        for token, same in groupby(ids[cursor : span.start]):
            text, count = shown.text(token), sum(1 for _ in same)
            if count <= _FEW:
                own += [_Chip(text, "text")] * count
            else:
                own.append(_Chip(f"{text} ×{count}", "text"))
        chips += _shortened(own) + _shortened(_of_item(shown, span.layout, span))
        cursor = span.stop
    return chips


def _of_item(shown: Shown, layout: Sequence[Runs], span: _Span) -> list[_Chip]:
    chips: list[_Chip] = []
    for run in layout:
        if isinstance(run, Run):
            kind = span.kind or ("embed" if run.embeds else "literal")
            chips.append(_Chip(notation([run], shown.text), kind, span.colour))
        else:
            end = _Chip(f") ×{run.count}", "sign", span.colour)
            chips += [_Chip("(", "sign", span.colour), *_of_item(shown, run.body, span), end]
    return chips


def _shortened(chips: list[_Chip]) -> list[_Chip]:
    """The first and the last of many chips."""
    hidden = len(chips) - _HEAD - _TAIL
    if hidden <= 1:
        return chips
    return [*chips[:_HEAD], _Chip(f"… {hidden} more …", "sign", chips[0].colour), *chips[-_TAIL:]]


@dataclass
class _Strip:
    """Chips in lines; rich would break within them."""

    chips: Sequence[_Chip]
    boxes: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text(no_wrap=True, overflow="crop")
        for chip in self.chips:
            padded = chip.kind == "embed" or (self.boxes and chip.kind != "sign")
            text = f" {chip.text} " if padded else chip.text
            if line and line.cell_len + cell_len(text) > options.max_width:
                yield line
                line = line.blank_copy()
            style = Style.parse(f"{_STYLES[chip.kind]} {chip.colour}")
            line.append(text, style + Style(meta={"box": chip.kind})).append(" ")
        yield line


# -- SVG -------------------------------------------------------------------------------------------

_COLUMNS, _ADVANCE, _LINE, _MARGIN = 114, 8, 21, 24
"""Letters in a line; pixels from one to the next, from line to line, and at the sides."""

_CSS = """
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}
text{fill:currentColor}
.b{font-weight:600} .embed{fill:currentColor} .literal,.written{fill:none;stroke:currentColor}
.written{stroke-dasharray:3 2}
"""
_LIGHT = """
.paper{fill:#fff;stroke:#d1d9e0} .ink{color:#1f2328} .dim{color:#656d76}
.text{fill:#eaeef2} .on{fill:#fff}
.blue{color:#0969da} .magenta{color:#8250df} .green{color:#1a7f37} .cyan{color:#1b7c83}
"""
_DARK = """
.paper{fill:#0d1117;stroke:#3d444d} .ink{color:#e6edf3} .dim{color:#9198a1}
.text{fill:#262c36} .on{fill:#0d1117}
.blue{color:#58a6ff} .magenta{color:#bc8cff} .green{color:#3fb950} .cyan{color:#39c5cf}
"""


def to_svg(shown: Shown) -> str:
    """The output of a terminal as a picture for light and dark pages: it follows
    `prefers-color-scheme`."""
    console = Console(width=_COLUMNS, file=StringIO())
    lines = console.render_lines(to_rich(shown, boxes=True), pad=False)
    width, height = _COLUMNS * _ADVANCE + 2 * _MARGIN, len(lines) * _LINE + 2 * _MARGIN
    size = f'width="{width}" height="{height}"'
    title = escape(f"{shown.spec}: the spec, and what becomes of a prompt")
    elements = [element for row, line in enumerate(lines) for element in _elements(row, line)]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} '
        'role="img">',
        f"<title>{title}</title>",
        f"<style>{_CSS}{_LIGHT}@media (prefers-color-scheme: dark){{{_DARK}}}</style>",
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" class="paper"/>',
        *elements,
        "</svg>\n",
    ])  # fmt: skip


def _elements(row: int, line: Sequence[Segment]) -> Iterator[str]:
    """One line of a terminal: a box where a chip is, and texts."""
    column, y = 0, _MARGIN + row * _LINE
    for segment in line:
        style, cells = segment.style or Style(), segment.cell_length
        colour = "dim" if style.dim else "ink"
        if style.color:
            colour = style.color.name
        x, box = _MARGIN + column * _ADVANCE, style.meta.get("box", "sign")
        if box != "sign":
            size = f'width="{cells * _ADVANCE}" height="{_LINE - 3}" rx="4"'
            yield f'<rect x="{x}" y="{y + 1.5}" {size} class="{box} {colour}"/>'
        if text := segment.text.strip():
            shade = "on" if style.reverse else colour
            weight = " b" if style.bold and box == "sign" else ""
            x += _ADVANCE * segment.text.index(text)
            length = f'textLength="{_ADVANCE * cell_len(text)}"'
            attributes = f'x="{x}" y="{y + 15.5}" {length} class="{shade}{weight}"'
            yield f"<text {attributes}>{escape(text)}</text>"
        column += cells
