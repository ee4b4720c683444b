"""``mmkit show``: a spec with its values for one checkpoint, and a prompt before and after."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..bound.modality import BoundModality
from ..errors import InputError, MmkitError
from ..field import Flat, Shared
from ..items import ItemType, shape_text
from ..layout import as_text
from ..model_spec import ModelSpec
from ..outputs import Output
from ..plan import Plan
from ..spec import Modality
from .common import Opened, UsageError, brief, open_checkpoint, plural, reason, write
from .draw import Example, ItemFacts, ModalityFacts, OutputFacts, Shown, to_rich, to_svg
from .formulas import Names, declared_parts, output_parts, read_values, used_variables
from .runs import notation, runs

# -- facts -----------------------------------------------------------------------------------------


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
        prompt: a text, or ids in the form ``1,2,3``; None for a prompt that suits the items.
        items: the items of the request, for example ``image=640x480``; see `parse_item`. Without
            items and prompt, examples are shown.
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
        facts = [_facts(modality, Names.of(spec)) for modality in spec.modalities]
        outputs = [_output_facts(output, Names.of(spec)) for output in spec.outputs]
        return Shown(spec.name, "", facts, outputs=outputs)
    opened = open_checkpoint(spec, folder, trust_remote_code=trust_remote_code)
    processor = opened.processor()
    plan: Plan = processor.plan
    facts = [_facts(modality, Names.of(spec), opened, processor) for modality in spec.modalities]
    data = _data(plan, forms) if forms or prompt is not None else _example_items(plan, processor)
    ids = _example_prompt(processor, data) if prompt is None else parse_prompt(prompt, processor)
    expanded, request = _request(processor, ids, data)
    tokens = _texts(opened.info.ctx.tokenizer, sorted({*ids, *expanded}))
    outputs = [_output_facts(output, Names.of(spec), opened, plan) for output in spec.outputs]
    return Shown(spec.name, opened.architecture, facts, ids, expanded, request, tokens, outputs)


def _texts(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """The texts of ids; ids without a readable text are left out."""
    if tokenizer is None:
        return {}
    return {token: text for token in ids if (text := _text(tokenizer, token))}


_VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", "▁": "␣", "Ġ": "␣"})


def _text(tokenizer: Any, token: int) -> str:
    text = str(tokenizer.decode([token], skip_special_tokens=False)).translate(_VISIBLE)
    text = text.strip(" ") or "␣" * len(text)
    # a lone space of some vocabularies, or a control character
    if not text or not text.isprintable():
        text = str(tokenizer.convert_ids_to_tokens(token)).translate(_VISIBLE)
    return brief(text, 40) if text.isprintable() and "\ufffd" not in text else ""


def _facts(
    modality: Modality, names: Names, opened: Opened | None = None, processor: Any = None
) -> ModalityFacts:
    """One modality, with values where there is a checkpoint."""
    bound = processor.plan.modalities.get(modality.name) if opened else None
    if opened is None or bound is None:
        parts = declared_parts(modality, names)
        return ModalityFacts(modality.name, opened is None, parts, used_variables(names, None))
    scope = opened.scope
    parts = declared_parts(modality, names, bound, names.bound(scope))
    items = [*bound.item.candidates(), *bound.item.small()]
    examples = [example for item in items if (example := _example(processor, bound, item))]
    smallest = min(examples, key=lambda example: example.rows, default=None)
    largest = max(examples, key=lambda example: example.rows, default=None)
    variables, values = used_variables(names, scope), read_values(modality, scope)
    return ModalityFacts(modality.name, True, parts, variables, values, smallest, largest)


def _output_facts(
    output: Output, names: Names, opened: Opened | None = None, plan: Plan | None = None
) -> OutputFacts:
    """One output, likewise."""
    bound = plan.outputs[output.name] if plan else None
    parts = output_parts(output, names, bound)
    return OutputFacts(output.name, parts, used_variables(names, opened.scope if opened else None))


# -- items -----------------------------------------------------------------------------------------


def parse_item(form: str, plan: Plan) -> tuple[str, Any]:
    """The modality and the item that ``modality=FORM`` means.

    FORM is ``zeros`` (the smallest item), sizes as ``9x4`` (the shape of a tensor, width x height
    of an image, frames x width x height of a video, samples of audio, characters of a text), JSON
    (a list, or the dict of a record), or a file: .json (a text, too), .npy, .safetensors with one
    tensor, or an image.

    Raises:
        UsageError: another form, an unknown modality, or JSON or a file that cannot be read.
    """
    name, separator, text = form.partition("=")
    where = f"--item {brief(form, 100)}"
    if not separator or name not in plan.modalities:
        expected = f"modality=FORM with a modality among {', '.join(plan.modalities)}"
        remedy = f"As in --item {next(iter(plan.modalities), 'image')}=zeros."
        raise UsageError(where, expected, repr(name), remedy)
    kind = plan.modalities[name].item
    if text == "zeros":
        return name, (kind.small() or kind.candidates())[0]
    if re.fullmatch(r"\d+(x\d+)*", text):
        return name, _of_sizes(kind, tuple(map(int, text.split("x"))), where)
    if text.lstrip().startswith(("{", "[")):
        return name, _parsed(text, where)
    if Path(text).suffix.lower() in _READERS:
        return name, _read(Path(text), where)
    expected = f"zeros, {kind.form}, or a file ({', '.join(_READERS)})"
    raise UsageError(where, expected, repr(text), f"As in --item {name}=zeros.")


def _of_sizes(kind: ItemType, sizes: tuple[int, ...], where: str) -> Any:
    count = len(kind.dummy_sizes) or kind.rank  # those of vLLM's items leave channels out
    if kind.part_names:
        raise UsageError(where, kind.form, "sizes")
    if len(sizes) != count:
        raise UsageError(where, f"{kind.form}, {count} size(s)", str(len(sizes)))
    if kind.dummy_sizes and 0 in sizes:
        raise UsageError(where, "sizes of at least 1", "x".join(map(str, sizes)))
    return kind.blank(*sizes)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        remedy = "In a shell, put single quotes around the whole."
        raise UsageError(where, "JSON", reason(error), remedy) from error


def _read(path: Path, where: str) -> Any:
    try:
        return _READERS[path.suffix.lower()](path)
    except Exception as error:
        got = reason(error)
        raise UsageError(where, f"a {path.suffix} file that can be read", got) from error


def _read_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    (tensor,) = load_file(path).values()
    return tensor


def _read_image(path: Path) -> Any:
    from PIL import Image as PILImage

    return PILImage.open(path).convert("RGB")


_READERS: Mapping[str, Callable[[Path], Any]] = {
    ".npy": np.load,  # which unpickles nothing
    ".safetensors": _read_safetensors,
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp"), _read_image),
}


def describe(value: Any) -> str:
    """An item in a few words: ``6×3``, ``640×480``, ``8 frames of 64×64``, ``ids 5, name 3
    characters``."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {describe(part)}" for name, part in value.items())
    if isinstance(value, str):
        return plural(len(value), "character")
    media = getattr(value, "media", value)
    if hasattr(media, "getbands"):
        return "{}×{}".format(*media.size)
    if isinstance(media, tuple):  # samples with their rate, or frames with metadata
        return describe(media[0])
    shape = tuple(np.shape(media))
    if len(shape) == 4 and shape[-1] == 3:
        return f"{shape[0]} frames of {shape[2]}×{shape[1]}"
    return "×".join(map(str, shape)) or "a number"


def _example(processor: Any, modality: BoundModality, value: Any) -> Example | None:
    from ..testing import vllm_path

    try:
        (piece,) = vllm_path.pieces(processor, modality.name, [value])
    except Exception:  # too small for the Hugging Face processor
        return None
    layout = notation(runs(piece.ids, piece.mask))
    return Example(describe(value), len(piece.ids), sum(piece.mask), layout)


def _data(plan: Plan, forms: Sequence[str]) -> dict[str, list[Any]]:
    data: dict[str, list[Any]] = {}
    for form in forms:
        name, value = parse_item(form, plan)
        data.setdefault(name, []).append(value)
    return data


def _example_items(plan: Plan, processor: Any) -> dict[str, list[Any]]:
    """One or two items of each modality, of two sizes where sizes vary."""
    data = {}
    for name, modality in plan.modalities.items():
        some = [value for value in modality.item.varied() if _example(processor, modality, value)]
        most = 2 if modality.limit is None else min(2, modality.limit)
        if some:
            data[name] = some[:most]
    return data


# -- the request -----------------------------------------------------------------------------------


def parse_prompt(prompt: str, processor: Any) -> list[int]:
    """The ids of a prompt: a text, which is tokenized as vLLM does for this processor, or ids as
    ``1,2,3``.

    Raises:
        UsageError: a text, for a model without a tokenizer.
    """
    if re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", prompt):
        return [int(token) for token in prompt.split(",")]
    if processor.info.ctx.tokenizer is None:
        expected = "token ids as 1,2,3, because the checkpoint has no tokenizer"
        raise UsageError("--prompt", expected, repr(brief(prompt, 60)))
    from ..testing import vllm_path

    return list(vllm_path.encoded(processor, prompt))


_TEXTS = ("See", "and", "now")


def _example_prompt(processor: Any, data: Mapping[str, Sequence[Any]]) -> list[int]:
    """A prompt with what stands for the items, and a few other tokens around and between."""
    from ..testing import vllm_path

    pieces: list[vllm_path.Piece] = []
    for name, values in data.items():
        pieces += vllm_path.pieces(processor, name, list(values))
    taken: set[int] = set()
    for piece in pieces:
        taken.update(piece.ids, piece.prefix, *piece.targets)
    before, between, after = _fillers(processor, taken)
    prefix = next((piece.prefix for piece in pieces if piece.prefix), [])
    rewritten = processor.plan.rewrite("prompt", before)  # which may bring the prefix
    ids = [*([] if rewritten[: len(prefix)] == prefix else prefix), *before]
    everything = [piece.written for piece in pieces if piece.written]
    if everything[:1] == [[getattr(processor.info.ctx.tokenizer, "bos_token_id", None)]]:
        ids = []  # the item takes the place of the token with which every text begins
    for number, written in enumerate(everything):
        ids += [*(between if number else []), *written]
    return [*ids, *after]


def _fillers(processor: Any, taken: set[int]) -> list[list[int]]:
    """Ordinary tokens for three gaps."""
    tokenizer = processor.info.ctx.tokenizer
    if tokenizer is not None:
        texts = [list(tokenizer.encode(text, add_special_tokens=False)) for text in _TEXTS]
        if all(0 < len(ids) <= 8 and taken.isdisjoint(ids) for ids in texts):
            return texts
    first = range(min(processor.plan.vocab_size, len(taken) + 12))
    free = [token for token in first if token not in taken]
    return [free[:3], free[3:6], free[6:9]]


def _request(
    processor: Any, prompt: list[int], data: Mapping[str, list[Any]]
) -> tuple[list[int], list[ItemFacts]]:
    """The expanded prompt, and the items where they stand in it."""
    from ..testing import vllm_path

    plan: Plan = processor.plan
    if not data:
        plan.check_ids(prompt)
        plan.check_bare(prompt)
        return plan.rewrite("prompt", prompt), []
    try:
        outcome = vllm_path.run(processor, prompt, data)
    except MmkitError:
        raise
    except Exception as error:
        where, expected = f"{plan.spec.name}.request", "items that the processor takes"
        raise InputError(where, expected, reason(error)) from error
    items, cursor = [], 0
    pieces = {name: vllm_path.pieces(processor, name, values) for name, values in data.items()}
    fields = {name: _fields(plan.modalities[name], parts) for name, parts in outcome.fields.items()}
    places = [
        (*place, name, index)
        for name, ranges in outcome.ranges.items()
        for index, place in enumerate(ranges)
    ]
    for start, length, mask, name, index in sorted(places):
        stop = start + length
        ids = outcome.ids[start:stop]
        written = _written(prompt, [pieces[name][index].written, ids], cursor)
        cursor = written[1] if written else cursor
        item, layout, own = describe(data[name][index]), runs(ids, mask), fields[name][index]
        items.append(ItemFacts(name, index, item, written, start, stop, sum(mask), layout, own))
    return outcome.ids, items


def _written(
    prompt: list[int], forms: Sequence[Sequence[int]], cursor: int
) -> tuple[int, int] | None:
    """Where the caller wrote something for an item, at or after a position."""
    text = as_text(prompt)
    for ids in forms:
        if ids and (begin := text.find(as_text(ids), cursor)) >= 0:
            return begin, begin + len(ids)
    return None


def _fields(modality: BoundModality, parts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Per item, its part of each processed tensor: ``pixel_values[3:8] (5, 3, 64, 64) float32``."""
    slices: list[list[str]] = [[] for _ in parts]
    for name in sorted(parts[0], key=[*modality.fields, *parts[0]].index):
        values = [part[name] for part in parts]
        field = modality.fields.get(name)
        places = [f"[{index}]" for index in range(len(parts))]
        if isinstance(field, Shared):
            places = [""] * len(parts)
        elif isinstance(field, Flat):
            ends = [0, *accumulate(int(np.shape(value)[field.dim]) for value in values)]
            before = ":, " * field.dim
            places = [f"[{before}{ends[i]}:{ends[i + 1]}]" for i in range(len(parts))]
        for item, place, value in zip(slices, places, values, strict=True):
            shape = f" {shape_text(tuple(value.shape))}" if getattr(value, "shape", ()) else ""
            dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
            item.append(f"{name}{place}{shape} {dtype}")
    return slices


# -- the command -----------------------------------------------------------------------------------


def to_json(shown: Shown) -> str:
    """All facts."""
    return json.dumps(asdict(shown), indent=2, ensure_ascii=False, default=str) + "\n"


def run(
    spec: ModelSpec,
    folder: str | Path | None = None,
    *,
    prompt: str | None = None,
    items: Iterable[str] = (),
    svg: str | None = None,
    json: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Print what there is to show, or write it to the files that are named; ``-`` is standard
    output."""
    shown = show(spec, folder, prompt=prompt, items=items, trust_remote_code=trust_remote_code)
    if svg is None and json is None:
        Console().print(to_rich(shown))
    for name, option, to_text in ((svg, "--svg", to_svg), (json, "--json", to_json)):
        if name == "-":
            sys.stdout.write(to_text(shown))
        elif name is not None:
            write(name, to_text(shown), option)
