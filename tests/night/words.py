"""Drawn specs that use texts in layouts, lists, parts that may be absent, sentinels and items that become ids only.

Each drawn part of an item type says in plain Python what a spec makes of it. So a request has an expected prompt,
expected ranges and expected fields, and nothing of mmkit makes them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from PIL import Image as PILImage
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from mmkit import (
    Image,
    List,
    Modality,
    ModelSpec,
    Record,
    Tensor,
    Text,
    batched,
    between,
    each,
    embed,
    fields,
    flat,
    insert,
    item,
    later,
    literal,
    optional,
    replace,
    tok,
    where,
)
from mmkit.testing.vllm_path import ItemRange
from tests.wild.common import make_llama_tokenizer

NUM_CODES = 4
CODES = [f"<code_{number}>" for number in range(NUM_CODES)]
NAMES = ("alpha", "beta")


def get_special(name: str) -> list[str]:
    """Return the tokens of a modality: its target, its placeholder, and two that stand in layouts."""
    return [f"<{name}>", f"<{name}_row>", f"<{name}_open>", f"<{name}_close>"]


ADDED = ["<s>", "</s>", *get_special("alpha"), *get_special("beta"), *CODES]
TEMPLATE = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Checkpoint(NamedTuple):
    """A checkpoint without weights.

    Attributes:
        folder: its folder.
        tokenizer: its tokenizer.
        spells_special: whether texts may spell special tokens. The account of a text is its tokens without added ones,
            and is exact where no two characters share a token.
    """

    folder: Path
    tokenizer: Any
    spells_special: bool

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text in a prompt, without what begins every text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_target(self, target: str) -> list[int]:
        """Return the ids of a target: a token, or a text."""
        return [self.find_id(target)] if target in ADDED else self.encode(target)

    def encode_plainly(self, text: str) -> list[int]:
        """Return the ids of a text in an item, out of which no added token comes."""
        if not self.spells_special:
            return self.encode(text)
        ids = []
        for word, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text):
            ids += [self.tokenizer.convert_tokens_to_ids(letter) for letter in word]
        return ids

    def find_id(self, token: str) -> int:
        number: int = self.tokenizer.convert_tokens_to_ids(token)
        return number


@cache
def open_checkpoint(kind: str) -> Checkpoint:
    """Write a checkpoint with a tokenizer of bytes, or one like Llama 2's."""
    tokenizer = make_byte_tokenizer() if kind == "bytes" else make_llama_tokenizer(ADDED[1:], TEMPLATE)
    folder = Path(tempfile.mkdtemp(prefix="mmkit-words-"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        architectures=["MmkitWords"],
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
        first_code=tokenizer.convert_tokens_to_ids(CODES[0]),
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Checkpoint(folder, tokenizer, spells_special=kind == "bytes")


def make_byte_tokenizer() -> Any:
    """Return a tokenizer with a token for each byte, and none for several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in ADDED])
    return tokenizer


# -- item types --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """An item type, and what a spec makes of its items.

    Attributes:
        item: the type.
        values: a strategy for items as a caller sends them.
        wrong: a strategy for items that are refused.
        layout: makes the layout, of an expression for the facts of an item.
        spell: returns the ids of the layout of an item as a caller sends it.
        count: returns numbers that tell two items apart, of an item as a caller sends it or in its canonical form.
        has_picture: whether there is a picture in it.
    """

    item: Any
    values: SearchStrategy[Any]
    wrong: SearchStrategy[Any]
    layout: Callable[[Any], Any]
    spell: Callable[[Any], list[int]]
    count: Callable[[Any], list[float]]
    has_picture: bool = False


FRAGMENTS = ("a", "C", "(=O)", " ", "é", "漢", "\n", "{}", "<", "user", "\U0001f600", "alpha")
SPELLED = ("</s>", "<s>", CODES[1], "<alpha_open>")
TEXT_TEMPLATES = ("{}", "({})", " {};", "{}\n")


@dataclass
class Maker:
    """Draws parts of one modality.

    Attributes:
        draw: of Hypothesis.
        checkpoint: the checkpoint of the spec.
        name: of the modality.
        has_rows: whether its layouts have placeholders.
    """

    draw: Any
    checkpoint: Checkpoint
    name: str
    has_rows: bool
    row: list[int] = field(init=False)
    row_layout: Any = field(init=False)
    close: list[int] = field(init=False)

    def __post_init__(self) -> None:
        closing = f"<{self.name}_close>"
        self.close = [self.checkpoint.find_id(closing)]
        # one position for each number, character or element: with a row where the modality has any
        if self.has_rows:
            placeholder = f"<{self.name}_row>"
            self.row = [self.checkpoint.find_id(placeholder)]
            self.row_layout = embed(tok[placeholder])
        else:
            self.row = self.close
            self.row_layout = literal(tok[closing])

    def choose(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def make_part(self, depth: int) -> Part:
        """Draw a part with at most so many levels of lists and records. Shrinks towards a text."""
        makers = [self.make_text, self.make_tensor, self.make_picture]
        if depth > 0:
            makers += [self.make_list, self.make_record, self.make_aligned] * 2
        maker = self.choose(*makers)
        if maker in (self.make_list, self.make_record):
            return maker(depth - 1)  # type: ignore[no-any-return]
        return maker()  # type: ignore[no-any-return]

    def make_text(self) -> Part:
        """Draw a text: its tokens as a whole or by characters, or a position for each character."""
        most = self.choose(6, 3, 12)
        alphabet = self.choose(None, "ACGT")
        fragments = list(FRAGMENTS)
        if self.checkpoint.spells_special:
            fragments += SPELLED
        if alphabet:
            fragments = list(alphabet)
        refused = st.sampled_from(["", "b" * (most + 1), 3, "\ud800"])
        target = f"<{self.name}>"
        if alphabet is None and len(target) <= most:
            refused = refused | st.just(target)
            if self.has_rows:
                refused = refused | st.just(f"<{self.name}_row>")
        template = self.choose(*TEXT_TEMPLATES)
        row, close = self.row, self.close
        encode = self.checkpoint.encode_plainly
        forms: dict[str, tuple[Callable[[Any], Any], Callable[[str], list[int]]]] = {
            "whole": (lambda x: tok.text(template, x.text), lambda text: encode(template.format(text))),
            "letters": (
                lambda x: each(later(list)(x.text), lambda letter: tok.text("{}", letter)),
                lambda text: [token for letter in text for token in encode(letter)],
            ),
            "length": (lambda x: self.row_layout * x.length, lambda text: row * len(text)),
            "number": (
                lambda x: tok.text("{}={}", x.text, x.length),
                lambda text: encode(f"{text}={len(text)}"),
            ),
            "choice": (
                lambda x: where(x.text == "C", tok.text("{}", x.text), literal(tok[f"<{self.name}_close>"])),
                lambda text: encode(text) if text == "C" else close,
            ),
        }
        layout, spell = forms[self.choose(*forms)]
        return Part(
            item=Text(most, alphabet=alphabet),
            values=st.lists(st.sampled_from(fragments), min_size=1, max_size=4)
            .map("".join)
            .filter(lambda text: len(text) <= most),
            wrong=refused,
            layout=layout,
            spell=spell,
            count=lambda text: [float(len(text))] + [float(ord(letter)) for letter in text],
        )

    def make_tensor(self) -> Part:
        """Draw a tensor of indices, of which -1 stands for none, or of floats, with a position for each number."""
        least = self.choose(1, 0)
        most = self.choose(2, 4)
        has_indices = self.choose(True, False)
        if has_indices:
            kind = Tensor((between(least, most),), "int64", bound=between(-1, 3))
            numbers = st.integers(-1, 3)
            refused: Any = st.sampled_from([[-2], [4], [0.5], [[0]]])
        else:
            kind = Tensor((between(least, most),), bound=4.0)
            numbers = st.integers(-16, 16).map(lambda number: number / 4)  # type: ignore[assignment]
            refused = st.sampled_from([[4.5], [float("nan")], [[0.0]], "no"])
        dtype = torch.int64 if has_indices else torch.float32
        container = self.choose(
            lambda values: torch.tensor(values, dtype=dtype),
            lambda values: np.array(values, dtype=np.int64 if has_indices else np.float32),
            list,
        )
        row = self.row
        return Part(
            item=kind,
            values=st.lists(numbers, min_size=least, max_size=most).map(container),
            wrong=refused | st.just([0] * (most + 1)),
            layout=lambda x: self.row_layout * x.length,
            spell=lambda values: row * len(values),
            count=lambda values: [float(len(values))] + [float(value) for value in values],
        )

    def make_picture(self) -> Part:
        """Draw a small picture, with a position for each column."""
        row = self.row

        def make_picture(width: int, height: int, shade: int) -> Any:
            return PILImage.new("RGB", (width, height), (shade, 0, 255))

        return Part(
            item=Image((3, 2)),
            values=st.builds(make_picture, st.integers(1, 3), st.integers(1, 2), st.sampled_from([0, 7])),
            wrong=st.sampled_from(["picture", 3]),
            layout=lambda x: self.row_layout * x.width,
            spell=lambda picture: row * picture.width,
            count=lambda picture: [float(picture.width), float(np.asarray(picture, dtype=np.float64).sum())],
            has_picture=True,
        )

    def make_list(self, depth: int) -> Part:
        """Draw a list, with tokens between its elements and behind them or without."""
        element = self.make_part(depth)
        least = self.choose(1, 0)
        most = self.choose(2, 3)
        between_two, behind = self.choose(False, True), self.choose(False, True)
        closing = tok[f"<{self.name}_close>"]
        options: dict[str, Any] = {}
        if between_two:
            options["sep"] = tok.text(", ")
        if behind:
            options["last"] = closing
        comma = self.checkpoint.encode_plainly(", ")

        def spell(values: Sequence[Any]) -> list[int]:
            ids: list[int] = []
            for number, value in enumerate(values):
                if number and between_two:
                    ids += comma
                ids += element.spell(value)
            if behind and len(values):
                ids += self.close
            return ids

        def count(values: Sequence[Any]) -> list[float]:
            numbers = [float(len(values))]
            for value in values:
                numbers += element.count(value)
            return numbers

        values = st.lists(element.values, min_size=least, max_size=most)
        too_many = st.lists(element.values, min_size=most + 1, max_size=most + 1)
        return Part(
            item=List(element.item, most=most, least=least),
            values=values,
            wrong=too_many | element.wrong.map(lambda value: [value]) | st.just([None]),
            layout=lambda x: each(x.elements, element.layout, **options),
            spell=spell,
            count=count,
            has_picture=element.has_picture,
        )

    def make_record(self, depth: int) -> Part:
        """Draw a record of one to three parts, of which some may be absent."""
        parts: dict[str, Part] = {}
        absent: dict[str, Any] = {}
        for name in ("one", "two", "three")[: self.choose(2, 1, 3)]:
            parts[name] = self.make_part(depth)
            if self.choose(True, False):
                absent[name] = self.choose((literal(), []), (self.row_layout, self.row), (tok.text("-"), "-"))
        for name, (layout, ids) in absent.items():
            if ids == "-":
                absent[name] = (layout, self.checkpoint.encode_plainly("-"))
        items = {name: optional(part.item) if name in absent else part.item for name, part in parts.items()}

        @st.composite
        def values(draw: Any) -> dict[str, Any]:
            record = {}
            for name, part in parts.items():
                form = draw(st.sampled_from(["present", "missing", "none"])) if name in absent else "present"
                if form != "missing":
                    record[name] = draw(part.values) if form == "present" else None
            return record

        @st.composite
        def wrong(draw: Any) -> Any:
            record = draw(values())
            name = draw(st.sampled_from([*parts, "unknown"]))
            if name == "unknown":
                return {**record, name: 1}
            if name not in absent and draw(st.booleans()):
                return {key: value for key, value in record.items() if key != name}
            refused = draw(parts[name].wrong)
            return {**record, name: "none" if refused is None else refused}

        def lay_out(x: Any) -> Any:
            whole = literal()
            for name, part in parts.items():
                facts = getattr(x, name)
                layout = part.layout(facts)
                if name in absent:
                    layout = where(facts, layout, absent[name][0])
                whole += layout
            return whole

        def spell(value: Mapping[str, Any]) -> list[int]:
            ids: list[int] = []
            for name, part in parts.items():
                if value.get(name) is None:
                    ids += absent[name][1]
                else:
                    ids += part.spell(value[name])
            return ids

        def count(value: Mapping[str, Any]) -> list[float]:
            numbers: list[float] = []
            for name, part in parts.items():
                if value.get(name) is None:
                    numbers.append(-100.0)
                else:
                    numbers += part.count(value[name])
            return numbers

        has_picture = any(part.has_picture for part in parts.values())
        return Part(Record(**items), values(), wrong(), lay_out, spell, count, has_picture)

    def make_aligned(self) -> Part:
        """Draw a record of which one part says how many elements another one has, and what a third one may refer to."""
        name = self.make_text()
        row = self.row
        kind = Record(
            series=Tensor((between(1, 3), 2)),
            names=List(name.item, most=item.series.length, least=item.series.length),
            parents=Tensor((item.series.length,), "int64", bound=between(-1, item.series.length - 1)),
        )

        @st.composite
        def values(draw: Any) -> dict[str, Any]:
            length = draw(st.integers(1, 3))
            return {
                "series": torch.arange(2.0 * length).reshape(length, 2),
                "names": [draw(name.values) for _ in range(length)],
                "parents": [draw(st.integers(-1, length - 1)) for _ in range(length)],
            }

        def make_wrong(value: dict[str, Any], change: str) -> dict[str, Any]:
            length = len(value["parents"])
            changes = {"names": value["names"] * 2, "parents": [length] * length, "series": value["series"][:0]}
            return {**value, change: changes[change]}

        def spell(value: Mapping[str, Any]) -> list[int]:
            ids: list[int] = []
            for text in value["names"]:
                ids += name.spell(text) + row
            return ids

        def count(value: Mapping[str, Any]) -> list[float]:
            numbers = [float(number) for number in torch.as_tensor(value["series"]).flatten()]
            for text in value["names"]:
                numbers += name.count(text)
            return numbers + [float(number) for number in value["parents"]]

        return Part(
            item=kind,
            values=values(),
            wrong=st.builds(make_wrong, values(), st.sampled_from(["names", "parents", "series"])),
            layout=lambda x: each(x.names.elements, lambda text: name.layout(text) + self.row_layout),
            spell=spell,
            count=count,
        )


# -- modalities and specs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A modality, and what becomes of its items.

    Attributes:
        modality: the declaration.
        part: its items.
        has_rows: whether its layouts have placeholders.
        has_codes: whether its layouts have codes, which only processing tells.
        row: the id of its placeholder.
        spell: returns the ids of the layout of an item as a caller sends it.
        target: what a caller writes for an item; empty where layouts are inserted.
    """

    modality: Modality
    part: Part
    has_rows: bool
    has_codes: bool
    row: int
    spell: Callable[[Any], list[int]]
    target: str


@dataclass(frozen=True)
class DrawnSpec:
    """A spec with the account of its items.

    Attributes:
        checkpoint: what it is bound to.
        kinds: its modalities.
        spec: the declaration.
    """

    checkpoint: Checkpoint
    kinds: Mapping[str, Kind]
    spec: ModelSpec = field(repr=False)

    def __repr__(self) -> str:
        return f"{self.spec!r} on {self.checkpoint.folder}"

    def make_template(self) -> str:
        """Return a chat template that writes texts, and the targets of items."""
        parts = "part.text if part.type == 'text'"
        for name, kind in self.kinds.items():
            parts += f" else '{kind.target}' if part.type == '{name}'"
        return (
            "{% for message in messages %}{% for part in message.content %}{{ " + parts + " }}{% endfor %}{% endfor %}"
        )


@st.composite
def specs(draw: Any) -> DrawnSpec:
    """Draw a spec of one or two modalities. Shrinks towards one of texts."""
    checkpoint = open_checkpoint(draw(st.sampled_from(["bytes", "llama"])))
    kinds = {}
    for name in NAMES[: draw(st.integers(1, 2))]:
        kinds[name] = draw_kind(draw, checkpoint, name)
    spec = ModelSpec("words", *[kind.modality for kind in kinds.values()])
    return DrawnSpec(checkpoint, kinds, spec)


def draw_kind(draw: Any, checkpoint: Checkpoint, name: str) -> Kind:
    """Draw a modality. Shrinks towards rows behind a target that is a token."""
    maker = Maker(draw, checkpoint, name, has_rows=draw(st.sampled_from([True, True, False])))
    part = maker.make_part(depth=2)
    targets = [f"<{name}>"]
    if checkpoint.spells_special:
        targets.append(f"[{name}]")
    if name == "alpha" and maker.has_rows:
        targets.append("")
    target = maker.choose(*targets)
    update: Any = insert(at="start")
    if target.startswith("<"):
        update = replace(tok[target])
    elif target:
        update = replace(tok.text(target))
    opening = f"<{name}_open>"
    opening_ids = [checkpoint.find_id(opening)]
    layout = literal(tok[opening])
    declared: dict[str, Any] = {}

    def spell_beginning(value: Any) -> list[int]:
        if maker.has_rows:
            return opening_ids + maker.row
        if declared:
            return opening_ids + [checkpoint.find_id(CODES[code]) for code in count_codes(part, value)]
        return opening_ids

    def spell(value: Any) -> list[int]:
        return spell_beginning(value) + part.spell(value)

    if maker.has_rows:
        layout += maker.row_layout  # an item has a row in any case
        declared = draw_fields(maker, part)
    elif draw(st.booleans()):
        layout += literal(fields.codes)
        declared = {"fields": {"codes": batched(dtype="int64")}, "process": make_codes(part)}
    layout += part.layout(item)
    modality = Modality(name, item=part.item, layout=layout, update=update, **declared)
    return Kind(
        modality=modality,
        part=part,
        has_rows=maker.has_rows,
        has_codes=bool(declared) and not maker.has_rows,
        row=maker.row[0],
        spell=spell,
        target=target,
    )


def draw_fields(maker: Maker, part: Part) -> dict[str, Any]:
    """Return fields with the numbers of each item: one tensor for each, or one for all."""
    name = maker.name
    numbers, length = f"{name}_numbers", f"{name}_length"
    is_joined = maker.choose(False, True)

    def process(values: Any, scope: Any) -> dict[str, Any]:
        rows = [torch.tensor(part.count(value)) for value in values]
        if not is_joined:
            return {numbers: rows}
        return {numbers: torch.cat(rows), length: [torch.tensor(len(row)) for row in rows]}

    if is_joined:
        return {
            "fields": {length: batched(dtype="int64"), numbers: flat(fields[length])},
            "process": process,
        }
    return {"fields": {numbers: batched()}, "process": process}


def count_codes(part: Part, value: Any) -> list[int]:
    """Return one to three codes that follow from the numbers of an item."""
    numbers = part.count(value)
    return [int(abs(number) * 4) % NUM_CODES for number in (numbers + [1.0])[:3]]


def make_codes(part: Part) -> Callable[[Any, Any], dict[str, Any]]:
    def process(values: Any, scope: Any) -> dict[str, Any]:
        return {"codes": [torch.tensor(count_codes(part, value)) + scope.cfg.first_code for value in values]}

    return process


# -- requests ----------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """What stands at a place of a prompt: a text, or an item, or the ids that an earlier item has left."""

    text: str = ""
    modality: str = ""
    value: Any = None
    is_earlier: bool = False


@dataclass(frozen=True)
class DrawnRequest:
    """A request with its account.

    Attributes:
        spec: the spec.
        places: what stands in the prompt, in order.
        data: the items, by modality.
    """

    spec: DrawnSpec = field(repr=False)
    places: Sequence[Place]
    data: Mapping[str, list[Any]]

    @property
    def text(self) -> str | None:
        """The prompt as a text; None where it has ids of earlier items."""
        text = ""
        for place in self.places:
            if place.is_earlier:
                return None
            text += self.spec.kinds[place.modality].target if place.modality else place.text
        return text

    def make_prompt(self, begins: bool = False) -> list[int]:
        """Return the prompt as ids.

        Args:
            begins: whether the tokenizer adds what begins every text.
        """
        if self.text is not None:
            ids: list[int] = self.spec.checkpoint.tokenizer.encode(self.text, add_special_tokens=begins)
            return ids
        ids = []
        for place in self.places:
            if place.is_earlier:
                ids += self.spec.kinds[place.modality].spell(place.value)
            else:
                text = self.spec.kinds[place.modality].target if place.modality else place.text
                ids += self.spec.checkpoint.encode(text)
        return ids

    def make_messages(self) -> list[dict[str, Any]]:
        """Return the prompt as a chat of one message, whose parts are the texts and the items."""
        parts: list[dict[str, Any]] = []
        items = {name: iter(values) for name, values in self.data.items()}
        for name, values in self.data.items():
            if not self.spec.kinds[name].target:
                parts += [{"type": name, name: value} for value in values]
        for place in self.places:
            if place.modality:
                parts.append({"type": place.modality, place.modality: next(items[place.modality])})
            else:
                parts.append({"type": "text", "text": place.text})
        return [{"role": "user", "content": parts}]

    def expand(self, prompt: list[int]) -> Expected:
        """Return what the request becomes, given its prompt as ids."""
        expected = Expected([], {}, {})
        remaining = {name: list(values) for name, values in self.data.items()}
        targets: dict[str, list[int]] = {}
        for name, values in remaining.items():
            kind = self.spec.kinds[name]
            if kind.target:
                targets[name] = self.spec.checkpoint.encode_target(kind.target)
                continue
            while values:  # they stand at the start
                expected.add(kind, values.pop(0))
        position = 0
        while position < len(prompt):
            for name, target in targets.items():
                if prompt[position : position + len(target)] == target:
                    expected.add(self.spec.kinds[name], remaining[name].pop(0))
                    position += len(target)
                    break
            else:
                expected.ids.append(prompt[position])
                position += 1
        assert not any(remaining.values()), "each item has a target"
        return expected


class Expected(NamedTuple):
    """What a request becomes, by the account.

    Attributes:
        ids: the expanded prompt.
        ranges: the places of the items with rows, by modality and item.
        numbers: what is in these items, by modality and item.
    """

    ids: list[int]
    ranges: dict[str, list[ItemRange]]
    numbers: dict[str, list[list[float]]]

    def add(self, kind: Kind, value: Any) -> None:
        """Append the layout of an item."""
        layout = kind.spell(value)
        name = kind.modality.name
        if kind.has_rows:
            mask = tuple(token == kind.row for token in layout)
            self.ranges.setdefault(name, []).append(ItemRange(len(self.ids), len(layout), mask))
            self.numbers.setdefault(name, []).append(kind.part.count(value))
        self.ids.extend(layout)


TEXTS = ("a", " ", "the user ", "\n", "é", "=2", "x, ", "-")


@st.composite
def requests(draw: Any, spec: DrawnSpec, most: int = 2) -> DrawnRequest:
    """Draw a request of up to so many items of each modality, among texts and ids of earlier items.

    Shrinks towards none.
    """
    data: dict[str, list[Any]] = {}
    turns: list[Place] = []
    for name, kind in spec.kinds.items():
        least = draw(st.sampled_from([0, 1, 1]))
        values = draw(st.lists(kind.part.values, min_size=least, max_size=most))
        if values:
            data[name] = values
        if kind.target:
            turns += [Place(modality=name)] * len(values)
        if not kind.has_rows and spec.checkpoint.spells_special and draw(st.booleans()):
            value = draw(kind.part.values)
            turns.append(Place(modality=name, value=value, is_earlier=True))
    places: list[Place] = []
    for turn in draw(st.permutations(turns)):
        places += draw_texts(draw) + [turn]
    places += draw_texts(draw)
    return DrawnRequest(spec, tuple(places), data)


def draw_texts(draw: Any) -> list[Place]:
    text = "".join(draw(st.lists(st.sampled_from(TEXTS), max_size=3)))
    return [Place(text)] if text else []


@st.composite
def wrong_requests(draw: Any, spec: DrawnSpec) -> DrawnRequest:
    """Draw a request of one item that is refused."""
    name = draw(st.sampled_from(sorted(spec.kinds)))
    kind = spec.kinds[name]
    place = Place(modality=name) if kind.target else Place("a")
    return DrawnRequest(spec, (place,), {name: [draw(kind.part.wrong)]})
