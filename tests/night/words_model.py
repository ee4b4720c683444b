"""A tiny model of cases: lists of records, parts that may be absent, a sentinel; and codes, which are ids.

The account says what the spec makes of a chat, as those of tests/wild do. Importing it registers the model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from mmkit import (
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
    item,
    literal,
    optional,
    replace,
    serve_transformers,
    tok,
    where,
)
from mmkit.training import MultiModalMixin
from tests.wild.common import (
    SIZES,
    Expansion,
    Message,
    WildModel,
    collect_items,
    draw_text,
    make_byte_tokenizer,
    make_item_part,
    make_message,
    make_text_part,
)
from tests.wild.compare import OpenModel

NUM_CODES = 8
CODES = [f"<code_{number}>" for number in range(NUM_CODES)]
SPECIAL = ["</s>", "<case>", "<row>", "<ecg>", "<begin>", "<end>", *CODES]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<' ~ part.type ~ '>' }}{% endfor %}\n{% endfor %}"
)

NOTE = Record(text=Text(8), weights=Tensor((between(0, 3),), bound=2.0), scale=optional(Tensor((), bound=2.0)))
CASE = Record(
    title=Text(12),
    notes=List(NOTE, most=3, least=0),
    parent=Tensor((), "int64", bound=between(-1, 9)),
    doctor=optional(Record(name=Text(5))),
)


def lay_out_note(note: Any) -> Any:
    return (
        tok.text(" {}:", note.text.text)
        + embed(tok["<row>"]) * note.weights.length
        + where(note.scale, tok.text("!"), literal())
    )


def make_rows(values: Any, scope: Any) -> dict[str, Any]:
    return {"rows": [torch.tensor(list_numbers(value)) for value in values]}


def list_numbers(case: Mapping[str, Any]) -> list[float]:
    """Return a number for each row: the parent, the scaled weights, and one for an absent doctor."""
    numbers = [float(case["parent"]) / 10]
    for note in case["notes"]:
        scale = 1.0 if note.get("scale") is None else float(note["scale"])
        numbers += [float(weight) * scale for weight in note["weights"]]
    if case.get("doctor") is None:
        numbers.append(-1.0)
    return numbers


def make_codes(values: Any, scope: Any) -> dict[str, Any]:
    return {"codes": [value + scope.cfg.first_code for value in values]}


CASES = ModelSpec(
    "cases",
    Modality(
        "case",
        item=CASE,
        layout=tok.text("[{}]", item.title.text)
        + embed(tok["<row>"])
        + each(item.notes.elements, lay_out_note, sep=tok.text(";"))
        + where(item.doctor, tok.text(" ({})", item.doctor.name.text), embed(tok["<row>"])),
        update=replace(tok["<case>"]),
        fields={"rows": batched()},
        process=make_rows,
    ),
    Modality(
        "ecg",
        item=Tensor((between(1, 6),), "int64", bound=between(0, NUM_CODES - 1)),
        layout=literal(tok["<begin>"], fields.codes, tok["<end>"]),
        update=replace(tok["<ecg>"]),
        fields={"codes": batched(dtype="int64")},
        process=make_codes,
    ),
)


class CasesConfig(LlamaConfig):
    """A Llama's, and the first of the codes."""

    model_type = "night_cases"

    first_code: int = 0


class CasesForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama, with a row for each number of a case."""

    mm_spec = CASES
    config_class = CasesConfig

    def __init__(self, config: CasesConfig) -> None:
        super().__init__(config)
        self.numbers = nn.Linear(1, config.hidden_size)
        self.post_init()

    def embed_case(self, rows: Any) -> list[torch.Tensor]:
        """Encode cases to rows (numbers, hidden_size)."""
        return [self.numbers(numbers.to(self.numbers.weight.dtype)[:, None]) for numbers in rows]


serve_transformers("tests.night.words_model:CasesForCausalLM", CasesConfig)


# -- chats -------------------------------------------------------------------------------------------------------------


def make_tokenizer() -> Any:
    return make_byte_tokenizer(SPECIAL, TEMPLATE, eos="</s>")


def make_config(vocab_size: int) -> CasesConfig:
    first_code = make_tokenizer().convert_tokens_to_ids(CODES[0])
    return CasesConfig(vocab_size=vocab_size, first_code=first_code, **SIZES)


def draw_item(rng: random.Random) -> dict[str, Any]:
    """Draw the part of a message with an item."""
    if rng.random() < 0.3:
        return make_item_part("ecg", [rng.randrange(NUM_CODES) for _ in range(rng.randint(1, 6))])
    case: dict[str, Any] = {"title": draw_item_text(rng, 12), "notes": [], "parent": rng.randint(-1, 9)}
    for _ in range(rng.randint(0, 3)):
        weights = [rng.randint(-8, 8) / 4 for _ in range(rng.randint(0, 3))]
        note: dict[str, Any] = {"text": draw_item_text(rng, 8), "weights": torch.tensor(weights)}
        if rng.random() < 0.5:
            note["scale"] = rng.choice([None, 0.5, 2.0])
        case["notes"].append(note)
    if rng.random() < 0.5:
        case["doctor"] = rng.choice([None, {"name": draw_item_text(rng, 5)}])
    return make_item_part("case", case)


def draw_item_text(rng: random.Random, most: int) -> str:
    return "".join(rng.choices("ab (=O)é'1\n", k=rng.randint(1, most)))


def draw(rng: random.Random) -> list[Message]:
    """Draw a message with one to three items among texts."""
    parts = [make_text_part(draw_text(rng))]
    for _ in range(rng.randint(1, 3)):
        parts += [draw_item(rng), make_text_part(draw_text(rng))]
    return [make_message("user", *parts)]


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what the spec is to make of a chat."""
    expansion = Expansion()
    items = {name: iter(values) for name, values in collect_items(messages).items()}
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    case, ecg = tokenizer.convert_tokens_to_ids(["<case>", "<ecg>"])
    for token in tokenizer(text).input_ids:
        if token == case:
            add_case(expansion, tokenizer, next(items["case"]))
        elif token == ecg:
            codes = tokenizer("".join(CODES[number] for number in next(items["ecg"]))).input_ids
            expansion.add_item("ecg", codes=torch.tensor(codes))
            expansion.add_ids(tokenizer.convert_tokens_to_ids(["<begin>"]) + codes)
            expansion.add_ids(tokenizer.convert_tokens_to_ids(["<end>"]))
        else:
            expansion.add_ids([token])
    return expansion


def add_case(expansion: Expansion, tokenizer: Any, case: Mapping[str, Any]) -> None:
    """Append a case to what the spec is to make of a chat."""
    row = tokenizer.convert_tokens_to_ids("<row>")
    expansion.add_item("case", rows=torch.tensor(list_numbers(case)))

    def add_text(text: str) -> None:
        expansion.add_ids(tokenizer(text).input_ids)

    add_text(f"[{case['title']}]")
    expansion.add_rows(1, row, "case")
    for number, note in enumerate(case["notes"]):
        if number:
            add_text(";")
        add_text(f" {note['text']}:")
        expansion.add_rows(len(note["weights"]), row, "case")
        if note.get("scale") is not None:
            add_text("!")
    if case.get("doctor") is None:
        expansion.add_rows(1, row, "case")
    else:
        add_text(f" ({case['doctor']['name']})")


MODEL = WildModel(CASES, "CasesForCausalLM", make_tokenizer, make_config, draw, expand)


@cache
def open_cases() -> OpenModel:
    """Bind the spec to its tokenizer and config."""
    tokenizer = make_tokenizer()
    config = make_config(len(tokenizer))
    return OpenModel(MODEL, tokenizer, config, CASES.hf_processor(config, tokenizer))
