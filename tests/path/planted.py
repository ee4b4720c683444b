"""Planted bugs: what people get wrong in a processor, a spec or a model, each with the law that must catch it.

A bug changes one thing in a correct base: `MIXED` (two modalities, text, kwargs) or `ROBOT` (ids only, placeholders
written by the caller) over a made-up checkpoint. docs/data/planted-bugs.md tells what each mistake is.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import Phase
from hypothesis import strategies as st
from torch import nn
from vllm import ModelRegistry
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import ProcessorBatchItems

from mmkit import (
    Image,
    InputError,
    Modality,
    ModelSpec,
    MultiModalModel,
    Output,
    Record,
    Tensor,
    Text,
    Video,
    already_expanded,
    any_id,
    batched,
    between,
    cfg,
    constant,
    derived,
    embed,
    fields,
    flat,
    hf,
    item,
    kwargs,
    tok,
)
from mmkit import replace as replaces
from mmkit.language.layout import ItemTokens
from mmkit.model.mrope import get_mrope_input_positions
from mmkit.plan.item import group_by_modality
from mmkit.plan.placement import ItemLayout, Placement
from mmkit.plan.soundness import compute_largest_magnitude
from mmkit.testing import ImageSample, NotApplicable, Subject, VideoSample, Violation, check_law, of_spec
from mmkit.vllm_api import pipeline
from mmkit.vllm_api.items import EmbedItems, Parser
from tests.oracles import SYSTEMS
from tests.profiles import profile
from tests.random_specs import write_checkpoint

# -- the correct base --------------------------------------------------------------------------------------------------

NUMBERED = [f"<|series_{i}|>" for i in range(1, 5)]
SPECIAL = ["<unk>", "<s>", "</s>", "<frame>", "<pad>", "<row>", "<open>", "<close>", "<series>", *NUMBERED]
TOKENS = [*SPECIAL, *"abcABC"]
ID = {word: i for i, word in enumerate(TOKENS)}
VOCABULARY, HIDDEN = 32, 8
BLACK = 20
"""The first of the ids that come out as pixels."""


def _series(items: Any, scope: Any) -> dict[str, Any]:
    """Each row `repeat` times, times `scale`: both are options of the request."""
    repeat, scale = scope.kwargs.get("repeat", 1), scope.kwargs.get("scale", 1)
    tensors = [value.repeat_interleave(repeat, dim=0) * scale for value in items]
    return {"values": torch.cat(tensors), "length": [torch.tensor(len(v)) for v in tensors]}


def series(**changes: Any) -> Modality:
    """(1..4, 2) tensors, in place of <series>."""
    parts: dict[str, Any] = {
        "item": Tensor(shape=(between(1, 4), 2), bound=8.0),
        "layout": tok["<open>"] + embed(tok["<row>"]) * fields.length + tok["<close>"],
        "update": replaces(tok["<series>"]),
        "fields": {
            "values": flat(fields.length),
            "length": batched(keep_on_cpu=True),
            "version": constant(7, dtype="int64"),
        },
        "process": _series,
        "limit": 4,
        **changes,
    }
    return Modality("series", **parts)


def frames(**changes: Any) -> Modality:
    """(2, 3) tensors, or embeddings of two rows, in place of <frame>."""
    parts: dict[str, Any] = {
        "item": Tensor(shape=(2, 3)),
        "layout": embed(tok["<pad>"]) * 2,
        "update": replaces(tok["<frame>"]),
        "fields": {"frames": batched()},
        "limit": 3,
        "embeds": True,
        **changes,
    }
    return Modality("frames", **parts)


def pixels(decode: Any = None, encode: Any = None, **options: Any) -> Output:
    """Two rows of three pixels in eight shades, with <close> after each."""
    return Output(
        "pixels",
        (any_id(BLACK, BLACK + 8) * 3 + tok["<close>"]) * 2,
        decode or (lambda ids, _: ids.reshape(2, 3) - BLACK),
        encode or (lambda array, _: array.reshape(-1) + BLACK),
        **options,
    )


MODALITIES: dict[str, Callable[..., Modality]] = {"series": series, "frames": frames}
MIXED = ModelSpec("mixed", series(), frames(), outputs=[pixels()])
BY_NUMBER = ModelSpec("mixed", series(update=replaces(tok["<|series_{}|>", item.index + 1])), frames())
PAGE = ModelSpec(
    "page",
    frames(
        item=Record(
            lines=Tensor((between(1, 4), 2)), click=Tensor((1,), "int64", bound=between(0, item.lines.length - 1))
        ),
        fields={"lines": batched(), "click": batched()},
        embeds=False,
    ),
)


def as_plain_text(scope: Any, text: str) -> list[int]:
    return scope.tok.text("{}", text)


def noted(encode: Callable[[Any, str], list[int]]) -> dict[str, Any]:
    """The changes of frames for items with a note, whose ids stand behind the placeholders."""

    def process(items: Any, scope: Any) -> dict[str, Any]:
        notes = [torch.tensor(encode(scope, one["note"]), dtype=torch.int64) for one in items]
        return {"frames": [one["frames"] for one in items], "note": notes}

    return {
        "item": Record(frames=Tensor(shape=(2, 3)), note=Text(most=12, alphabet="abc <>/adeilmnoprsuw")),
        "layout": embed(tok["<pad>"]) * 2 + fields.note,
        "fields": {"frames": batched(), "note": batched(hidden=True)},
        "process": process,
        "embeds": False,
    }


NOTED = ModelSpec("noted", frames(**noted(as_plain_text)))
ROBOT = ModelSpec(
    "robot",
    Modality(
        "actions",
        item=Tensor(shape=(3, 2), bound=0.1),
        layout=embed(cfg.pad_token_id) * 3,
        update=already_expanded(),
        fields={"actions": batched(shape=(3, 2), dtype="float32")},
        limit=3,
    ),
)
KWARGS: Any = st.sampled_from([{}, {"scale": 2}, {"repeat": 2}])


class Body(nn.Module):
    """A language model as far as the laws look: a table of embeddings, and a head."""

    def __init__(self, vocabulary: int = VOCABULARY, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, hidden)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.table.weight.T


class _Encoders(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = Body()
        self.series_projection, self.frames_projection = nn.Linear(2, HIDDEN), nn.Linear(3, HIDDEN)

    def get_language_model(self) -> Any:
        return self.body

    def embed_series(self, values: torch.Tensor, length: Any, version: Any) -> Any:
        rows = self.series_projection(values.to(self.series_projection.weight.dtype))
        return rows.split([int(n) for n in length])

    def embed_frames(self, frames: torch.Tensor) -> Any:
        return self.frames_projection(frames.to(self.frames_projection.weight.dtype))

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Any:
        raise NotImplementedError


class Derived(MultiModalModel, _Encoders):
    """A correct model class by mmkit's mixin."""


class ByHand(_Encoders, SupportsMultiModal):
    """A correct model class written by hand, without the mixin's checks."""

    def embed_multimodal(self, **fields: Any) -> Any:
        rows: list[torch.Tensor] = []
        if "values" in fields:
            rows += self.embed_series(fields["values"], fields["length"], None)
        if "frames" in fields:
            rows += self.embed_frames(fields["frames"])
        rows += fields.get("frames_embeds", ())
        return self.sound(rows)

    def sound(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        dtype = self.body.table.weight.dtype
        return [row if row.abs().amax() <= compute_largest_magnitude(dtype) else torch.zeros_like(row) for row in rows]

    def embed_input_ids(self, input_ids: Any, multimodal_embeddings: Any = None, *, is_multimodal: Any = None) -> Any:
        embeds = self.body.embed_input_ids(self.known(input_ids))
        if multimodal_embeddings:
            embeds[is_multimodal] = torch.cat(multimodal_embeddings).to(embeds.dtype)
        return embeds

    def known(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids.clamp(0, VOCABULARY - 1)

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        return self.masked(self.body.compute_logits(hidden_states))

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([ID["<pad>"], ID["<row>"]]), -torch.inf)


class OneLength(ByHand):
    """Embeddings of series are stacked, as if all of a batch had one length."""

    def embed_multimodal(self, **fields: Any) -> Any:
        sent = fields.pop("series_embeds", None)
        return super().embed_multimodal(**fields) if sent is None else list(torch.stack(list(sent)))


_numbers = itertools.count()


@cache
def checkpoint(architecture: str = "PlantedForCausalLM", tokenizer: bool = True) -> Path:
    """A folder with a tiny config and, for text, a tokenizer of whole words that begins every text with <s>."""
    config = {"architectures": [architecture], "vocab_size": VOCABULARY, "max_position_embeddings": 256}
    words = TOKENS if tokenizer else []
    folder = Path(tempfile.mkdtemp(prefix="mmkit-planted-"))
    return write_checkpoint(folder, words, SPECIAL[3:], begins=tokenizer, pad_token_id=31, **config)


def mixed(spec: ModelSpec = MIXED, **classes: type) -> Subject:
    """`MIXED`, or another spec, with subclasses of the generated classes in their place."""
    return of_spec(spec, checkpoint(), kwargs=KWARGS, classes=spec.classes._replace(**classes))


def with_model(model: type, spec: ModelSpec = MIXED, make: Any = checkpoint, kwargs: Any = KWARGS) -> Subject:
    """A spec with a model class, in vLLM's registries."""
    return of_spec(spec, make(_registered(model, spec)), kwargs=kwargs)


def _registered(model: type, spec: ModelSpec) -> str:
    name = f"{model.__name__}{next(_numbers)}ForCausalLM"  # vLLM keeps what it has found out of an architecture
    named = type(name, (model,), {"mm_spec": spec, "__module__": __name__})
    classes = spec.classes
    classes.processor.sends_rows = issubclass(model, MultiModalModel)
    MULTIMODAL_REGISTRY.register_processor(classes.processor, info=classes.info, dummy_inputs=classes.dummy_inputs)(
        named
    )
    ModelRegistry.register_model(name, named)
    return name


BASES: dict[str, Callable[[], Subject]] = {
    "mixed": partial(with_model, Derived),
    "by hand": partial(with_model, ByHand),
    "robot": lambda: of_spec(ROBOT, checkpoint(tokenizer=False)),
}
"""Correct ones, of which every law holds."""


# -- bugs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bug:
    """One planted bug.

    Attributes:
        law: the law that must catch it.
        name: as docs/data/planted-bugs.md has it.
        hook: what is overridden: a method, as ``processor.METHOD`` (or info, parser, model); a step of a request, as
            ``pipeline.STEP``; a modality, ``series`` or ``frames``; or its function, as ``frames.process``. ``subject``
            for what no single hook makes.
        change: the new method, which gets the inherited one and its arguments; what returns the changes of a modality;
            its new function; or what makes the subject.
        message: a regular expression for what the law says.
        model: a correct model class for a changed spec; None for a law that needs none.
    """

    law: str
    name: str
    hook: str
    change: Callable[..., Any]
    message: str
    spec: ModelSpec = MIXED
    model: type | None = None

    def subject(self) -> Subject:
        """The broken thing."""
        part, _, method = self.hook.partition(".")
        if part == "subject":
            return self.change()
        if part == "model":
            return with_model(overriding(ByHand, method, self.change))
        if part in MODALITIES:
            changes = {method: self.change} if method else self.change()
            spec = ModelSpec("mixed", *(make(**changes if name == part else {}) for name, make in MODALITIES.items()))
            return mixed(spec) if self.model is None else with_model(self.model, spec)
        if part == "pipeline":
            return mixed(self.spec, processor=taking_step(self.spec.classes.processor, method, self.change))
        if part == "parser":
            return mixed(self.spec, info=parsing(self.spec, overriding(Parser, method, self.change)))
        return mixed(self.spec, **{part: overriding(getattr(self.spec.classes, part), method, self.change)})


def overriding(base: type, hook: str, change: Callable[..., Any]) -> type:
    """A subclass with another method, a function of the inherited one and of its arguments."""

    @wraps(getattr(base, hook))
    def method(self: Any, *rest: Any, **named: Any) -> Any:
        return change(getattr(super(subclass, self), hook), *rest, **named)

    subclass = type(base.__name__, (base,), {"__module__": __name__, hook: method})
    return subclass


def taking_step(base: type, step: str, change: Callable[..., Any]) -> type:
    """A subclass of a processor that takes a step of its requests otherwise: by a function of the correct step and of
    its arguments."""
    changed = partial(change, getattr(pipeline, step))

    def render(inherited: Callable[..., Any], *request: Any) -> Any:
        with patch.object(pipeline, step, changed):
            return inherited(*request)

    return overriding(base, "render", render)


def parsing(spec: ModelSpec, parser: type) -> type:
    """The info class of a spec with another parser."""

    def parser_of(inherited: Callable[[], Parser]) -> Parser:
        correct = inherited()
        return parser(correct.plan, correct.hidden_size)

    return overriding(spec.classes.info, "get_data_parser", parser_of)


_SHADES = np.linspace(0, 255, 7).astype(np.uint8)
_PICTURE = np.zeros((2, 3), np.int64)


def picture_kept_in_one_place(ids, scope):
    _PICTURE[:] = ids.reshape(2, 3) - BLACK
    return _PICTURE


def black_rows_cut_off(ids, scope):
    rows = ids.reshape(2, 3) - BLACK
    return rows[rows.any(axis=1)]


def fast_path_for_several(items, scope):
    frames = torch.stack(items)
    scaled = frames / 3 if len(items) == 1 else frames.half().div(3).float()
    return {"frames": scaled}


def with_pixels(**functions: Any) -> Callable[[], Subject]:
    return lambda: mixed(MIXED.model_copy(update={"outputs": [pixels(**functions)]}))


def layout_longer_than_the_rows():
    return {"layout": embed(tok["<pad>"]) * 3}


def _placed_otherwise(change: Callable[[Any, Any], Any], inherited: Any, *request: Any) -> Any:
    """Items are placed as ever, and then each place is changed, a function of it and of all places."""
    ids, placed = inherited(*request)
    return ids, [change(at, placed) for at in placed]


def of_the_first(at, placed):
    return next(other.start for other in placed if other.modality == at.modality)


def all_embed(at, _):
    return replace(at, tokens=ItemTokens(at.tokens.ids, bytes([1]) * len(at.tokens)))


def end_of_the_prompt_dropped(inherited, *request):
    ids, placed = inherited(*request)
    return ids[: max(at.end for at in placed)], placed


def _prompted(change: Callable[[list[int]], list[int]]) -> Callable[..., Any]:
    """Items are placed in another prompt."""
    return lambda inherited, plan, request: inherited(plan, replace(request, prompt=change(request.prompt)))


def prompt_in_lower_case(prompt):
    return [ID.get(TOKENS[token].lower(), token) if token < len(TOKENS) else token for token in prompt]


def begun_with_another_token(prompt):
    return [*prompt[:1], ID["a"], *prompt[1:]]


def numbered_in_order(prompt):
    numbers = iter(ID[word] for word in NUMBERED)
    return [next(numbers) if token in {ID[word] for word in NUMBERED} else token for token in prompt]


def ids_that_are_not_the_layout(inherited, *request):
    ids, placed = inherited(*request)
    starts = {at.start for at in placed}
    return [ID["<unk>"] if i in starts else token for i, token in enumerate(ids)], placed


def items_swapped_after_a_hit(inherited, reader, request, *rest):
    is_hit = any(item.engine_fields is None for item in request.items)
    inherited(reader, request, *rest)
    if is_hit:
        for group in group_by_modality(request.items).values():
            swapped = [item.engine_fields for item in reversed(group)]
            for item, fields in zip(group, swapped, strict=True):
                item.engine_fields = fields


def kwargs_missing_in_the_cache_key(inherited, plan, hasher, request):
    inherited(plan, hasher, replace(request, options={}))


def target_of_another_position(inherited, plan, request):
    kept = [replace(item, layout=ItemLayout(item.layout.tokens, item.layout.updates)) for item in request.items]
    return inherited(plan, replace(request, items=kept))


def receiver_gets_other_data(inherited, plan, reader, request):
    missing = inherited(plan, reader, request)
    groups = group_by_modality(request.items)
    for name, group in group_by_modality(missing).items():
        first = [item.value for item in groups[name]]
        for missing_item, value in zip(group, first, strict=False):
            missing_item.value = value
    return missing


def _read(before: list[str], inherited: Any, prompt: Any, *rest: Any, **named: Any) -> Any:
    """Texts are read by the processor, as words after some others."""
    if isinstance(prompt, str):
        prompt = [ID.get(word, ID["<unk>"]) for word in [*before, *prompt.split()]]
    return inherited(prompt, *rest, **named)


_BUFFER = torch.zeros(8, 2, 3)


def _are_small(items: Any) -> bool:
    """Whether all values are as small as those with which a spec is rehearsed when it is bound, which would find the
    mistake."""
    return all(float(item.abs().max()) <= 2 for item in items)


def buffer_written_again(items, scope):
    if _are_small(items):
        return {"frames": torch.stack(list(items))}
    for i, value in enumerate(items):
        _BUFFER[i] = value
    return {"frames": _BUFFER[: len(items)]}


def dummy_of_several_modalities(inherited, seq_len, mm_counts, *rest, **named):
    return inherited(seq_len, {name: mm_counts[name] for name in MODALITIES}, *rest, **named)


def _padded(items: Any, scope: Any) -> dict[str, Any]:
    if _are_small(items):
        return {"values": list(items), "length": torch.tensor([len(item) for item in items])}
    values = nn.utils.rnn.pad_sequence(list(items), batch_first=True)
    return {"values": values, "length": torch.tensor([len(value) for value in items])}


def normalised_over_the_batch(items, scope):
    values = torch.stack(list(items))
    return {"frames": values / values.abs().max().clamp(min=2)}


def field_of_the_index():
    fields = {"frames": batched(), "position": derived(item.index, dtype="int64")}
    return {"process": lambda items, _: {"frames": torch.stack(items)}, "fields": fields, "cacheable": item.count <= 9}


def _stated(more: int) -> Callable[..., Any]:
    return lambda inherited, seq_len, mm_counts: {name: n + more for name, n in inherited(seq_len, mm_counts).items()}


def hash_of_the_shape(inherited, plan, hasher, request):
    options = sorted(request.options.items())
    for part in request.items:
        part.hash = f"{part.modality} {tuple(part.value.shape)} {options}"


def embeddings_taken_for_items(inherited: Any, modality: Any, data: Any) -> Any:
    return inherited(modality, data[modality.parser.embeds_field] if isinstance(data, dict) else data)


def hash_of_the_container(inherited, modality, data):
    if isinstance(data, Mapping):  # embeddings
        return inherited(modality, data)
    values = [value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value)) for value in data]
    return ProcessorBatchItems(values, modality.name)


def field_left_out(inherited, modality, own, *rest):
    return inherited(modality, {name: value for name, value in own.items() if name != "version"}, *rest)


def _split(change: Callable[[torch.Tensor, list[int]], Any], inherited: Any, plan: Any, items: Any, *rest: Any) -> None:
    """The rows of all series are cut otherwise, by a function of them and of the number of each."""
    inherited(plan, items, *rest)
    parts = [item.fields for item in items if item.modality == "series" and "values" in item.fields]
    if parts:
        rows = [part["values"] for part in parts]
        for part, own in zip(parts, change(torch.cat(rows), [*map(len, rows)]), strict=True):
            part["values"] = own


def surplus_items_accepted(inherited, inputs, timing):
    items = inputs.mm_data_items.get("frames")
    if items is not None and not isinstance(items, EmbedItems):
        items.data = items.data[: inputs.prompt.count(ID["<frame>"])]
    return inherited(inputs, timing)


def missing_items_accepted(inherited, inputs, timing):
    while inputs.prompt.count(ID["<frame>"]) > len(inputs.mm_data_items.get("frames", ())) > 0:
        inputs.prompt.remove(ID["<frame>"])
    return inherited(inputs, timing)


def _mended(inherited: Any, modality: Any, data: Any, mend: Callable[[Any], Any]) -> Any:
    """Items are parsed; where they are refused, something is made of the tensors among them."""
    try:
        return inherited(modality, data)
    except InputError:
        return inherited(modality, [mend(value) if isinstance(value, torch.Tensor) else value for value in data])


def index_beyond_its_part(inherited, modality, data):
    try:
        return inherited(modality, data)
    except InputError as error:
        if ".click: expected int64 values from" not in str(error):
            raise
        return inherited(modality, [{**value, "click": value["click"].clamp(0, 0)} for value in data])


def as_the_tokenizer_reads_it(scope, text):
    return scope.tok.tokenizer.encode(text, add_special_tokens=False)


def placeholder_of_a_text(inherited, modality, data):
    parser = replace(modality.parser, placeholder_texts=())
    return inherited(replace(modality, parser=parser), data)


def unknown_modality_ignored(inherited, mm_data, **options):
    return inherited({name: data for name, data in mm_data.items() if name in MODALITIES}, **options)


def message_without_modality(inherited, mm_data, **options):
    try:
        return inherited(mm_data, **options)
    except InputError:
        raise InputError("request", "well-formed items", "others") from None


def targets_replaced_without_a_look(inherited, plan, request):
    ids: list[int] = []
    placed: list[Placement] = []
    for token in request.prompt:
        if token != ID["<frame>"] or len(placed) == len(request.items):
            ids.append(token)
            continue
        layout = request.items[len(placed)].layout
        placed.append(Placement("frames", len(placed), len(ids), layout.tokens))
        ids += placed[-1].tokens.ids
    if len(placed) != len(request.items):
        raise InputError("double.frames", "<frame> for each item", f"{len(placed)} of them")
    return ids, placed


def expanded_prompt_refused(inherited, plan, request):
    if ID["<pad>"] in request.prompt:
        raise InputError("mixed.frames", "<frame>", "<pad>")
    return inherited(plan, request)


def embeddings_that_raise(inherited, plan, items, **options):
    inherited(plan, items, **options)
    assert all(len(item.engine_fields["frames"].data) for item in items if item.modality == "frames")


def hash_of_the_file(inherited, plan, hasher, request):
    inherited(plan, hasher, request)
    for part in request.items:
        file = getattr(part.content, "original_bytes", None)
        if file:
            part.hash = hashlib.sha256(file).hexdigest()


def another_llava(step: tuple[str, Callable[..., Any]] | None = None, **changes: Any) -> Subject:
    """LLaVA with its Hugging Face processor, and another step of requests, or a modality that is declared otherwise."""
    system = SYSTEMS["llava"]
    (image,) = system.load_spec().modalities
    spec = ModelSpec("llava", image.model_copy(update=changes))
    images = st.builds(ImageSample, st.integers(0, 2), *[st.integers(1, 40)] * 2)
    change = {"processor": taking_step(spec.classes.processor, *step)} if step else {}
    classes = spec.classes._replace(**change)
    return of_spec(spec, system.checkpoint, classes=classes, samples={"image": images})


class Scale:
    """Pixels in the corner of images and videos, times an option."""

    def __call__(self, images=(), videos=(), scale=1, return_tensors=None):
        def corners(items):
            return [torch.from_numpy(np.asarray(item)[..., :1, :1, :].astype(np.float32)) * scale for item in items]

        return {"pictures": corners(images), "clips": corners(videos)}


SCALE = Scale()


MEDIA = ModelSpec(
    "media",
    Modality(
        "image",
        item=Image(largest=(8, 8)),
        placeholder=tok["<pad>"],
        tokens=kwargs.get("rows", 2),
        update=replaces(tok["<frame>"]),
        fields={"pictures": batched()},
        process=hf(SCALE),
        limit=2,
    ),
    Modality(
        "video",
        item=Video(largest=(3, 8, 8)),
        placeholder=tok["<row>"],
        tokens=kwargs.get("rows", 2),
        update=replaces(tok["<series>"]),
        fields={"clips": batched()},
        process=hf(SCALE),
        limit=2,
    ),
)
"""Two modalities of one processor."""


def media(**classes: type) -> Subject:
    options = st.sampled_from([{}, {"scale": 2}, {"rows": 3}])
    return of_spec(MEDIA, checkpoint(), kwargs=options, classes=MEDIA.classes._replace(**classes))


def options_of_another_modality():
    def render(inherited, request, *timer):
        if len(group_by_modality(request.items)) > 1:
            merged = dict(request.options)
            for of_scope in request.options.values():
                merged |= of_scope if isinstance(of_scope, dict) else {}
            request = replace(request, options=merged)
        return inherited(request, *timer)

    return media(processor=overriding(MEDIA.classes.processor, "render", render))


def integers_by_an_option():
    correct = pipeline.process_items

    def process_items(plan, items, *rest):
        correct(plan, items, *rest)
        for part in items:
            if part.modality == "frames" and not part.is_embedding:
                part.fields = {"frames": part.fields["frames"].int()}

    def render(inherited, request, *timer):
        step = process_items if request.options else correct
        with patch.object(pipeline, "process_items", step):
            return inherited(request, *timer)

    classes = MIXED.classes._replace(processor=overriding(MIXED.classes.processor, "render", render))
    return of_spec(MIXED, checkpoint(_registered(ByHand, MIXED)), kwargs=KWARGS, classes=classes)


def flipped_channels(items, scope):
    return {"pixel_values": scope.proc.image_processor(list(items), return_tensors="pt")["pixel_values"].flip(-3)}


class Rotated(MultiModalModel, _Encoders):
    """Qwen2-VL as far as its positions go."""

    get_mrope_input_positions = get_mrope_input_positions

    def embed_image(self, **fields: Any) -> Any: ...
    def embed_video(self, **fields: Any) -> Any: ...


def another_qwen(
    modality: str = "", sizes: Callable[..., Any] | None = None, change: Callable[..., Any] | None = None
) -> Subject:
    """Qwen2-VL with its Hugging Face model, and a modality whose grid has other sizes, or a model class with another
    method for its positions."""
    system, options = SYSTEMS["qwen2_vl"], {}
    parts = [
        part.model_copy(update={"positions": sizes(*part.positions)} if sizes and part.name == modality else {})
        for part in system.load_spec().modalities
    ]
    spec = ModelSpec("qwen2_vl", *parts)
    if change is not None:
        model = overriding(Rotated, "get_mrope_input_positions", change)
        options = {"hf_overrides": {"architectures": [_registered(model, spec)]}}
    seeds, side = st.integers(0, 2), st.integers(56, 112)  # of two squares, as many as of frames at most
    samples = {
        "image": st.builds(ImageSample, seeds, side, side),
        "video": st.builds(VideoSample, seeds, st.integers(1, 4), side, side),
    }
    return of_spec(spec, system.checkpoint, samples=samples, **options)


def items_of_the_whole_prompt(inherited, ids, items):
    positions, delta = inherited(ids, items)
    for place in [one.mm_position for one in items[:1]]:
        positions[:, place.offset : place.offset + place.length] += len(items) - 1
    return positions, delta


def memory_of_the_caller(inherited, modality, data):
    items = inherited(modality, data)
    if isinstance(data, list) and all(isinstance(value, torch.Tensor) for value in data):
        return ProcessorBatchItems(data, modality.name)
    return items


def bare_placeholders_as_nan(inherited, input_ids, *rest, **named):
    return inherited(input_ids, *rest, **named).masked_fill((input_ids == ID["<pad>"])[:, None], torch.nan)


# -- the table ---------------------------------------------------------------------------------------------------------

PLACING, HASHES, PROCESSING = "pipeline.place_items", "pipeline.hash_items", "pipeline.process_items"
STATED = "info.get_mm_max_tokens_per_item"
OUTSIDE = r"outside the ranges the prompt is \[.*\], the caller's \[.*\]"
ELSEWHERE = r"token \d+ is at \[\d+, \d+, \d+\], and in Qwen2VLModel at \[\d+, \d+, \d+\]"
CACHED = "without a cache and with one in (one process|two processes): "

BUGS = [
    Bug("counts", "layout_longer_than_the_rows", "frames", layout_longer_than_the_rows,
        r"frames\[0\] has 2 encoder rows and 3 embed positions", model=ByHand),
    Bug("counts", "layout_longer_than_the_rows_of_a_mixin", "frames",
        lambda: {"layout": embed(tok["<pad>"]) * (item.length + 1), "embeds": embed(tok["<pad>"]) * item.rows},
        r"mixed\.frames, embed_frames, item 0: expected 3 encoder rows, got 2", model=Derived),
    Bug("counts", "literal_in_the_mask", "series",
        lambda: {"layout": embed(tok["<open>"]) + embed(tok["<row>"]) * fields.length + tok["<close>"]},
        r"series\[0\] has 1 encoder rows and 2 embed positions", model=ByHand),
    Bug("counts", "one_output_fewer_than_items", "model.embed_multimodal",
        lambda inherited, **fields: inherited(**fields)[:-1], r"0 encoder outputs for 1 items of (frames|series)"),
    Bug("counts", "rows_of_another_width", "model.embed_multimodal",
        lambda inherited, **fields: [row[:, 1:] for row in inherited(**fields)],
        r"\[0\] has rows of shape \(7,\), and the model takes \(8,\)"),
    Bug("ranges", "range_off_by_one", PLACING,
        partial(_placed_otherwise, lambda at, _: replace(at, start=at.start + 1)),
        r"(series|frames)\[0\] ends at (\d+), past \d+ ids|the ids at (series|frames)\[0\] are \[.*\], its layout"),
    Bug("ranges", "overlapping_ranges", PLACING,
        partial(_placed_otherwise, lambda at, placed: replace(at, start=of_the_first(at, placed))),
        r"\[\d\] (at \d+ begins inside the range before it, which ends at \d+|are \[.*\], its layout is \[)"),
    Bug("ranges", "end_of_the_prompt_dropped", PLACING, end_of_the_prompt_dropped, OUTSIDE),
    Bug("ranges", "prompt_in_lower_case", PLACING, _prompted(prompt_in_lower_case), OUTSIDE),
    Bug("ranges", "ids_that_are_not_the_layout", PLACING, ids_that_are_not_the_layout,
        r"the ids at (series|frames)\[0\] are \[0, .*\], its layout is \[[^0].*\]"),
    Bug("ranges", "numbers_ignored", PLACING, _prompted(numbered_in_order),
        r"placeholders of \[\('series', \d\), .*\] get the items \[\('series', 0\), ", spec=BY_NUMBER),
    Bug("ranges", "mask_lost", PLACING, partial(_placed_otherwise, all_embed),
        r"the mask of series\[0\] is not that of its layout"),
    Bug("cache", "items_swapped_after_a_hit", "pipeline.exchange_with_cache", items_swapped_after_a_hit,
        r"in one process: fields\['(series|frames)'\]|in two processes: MultiModalCacheMissError: "),
    Bug("cache", "kwargs_missing_in_the_cache_key", HASHES, kwargs_missing_in_the_cache_key,
        f"(?s){CACHED}(fields|ids).*kwargs="),
    Bug("cache", "target_of_another_position", PLACING, target_of_another_position,
        r"with a cache in one process: (InputError|NotFound): mixed\.series|with one in one process: (ids|ranges)",
        spec=BY_NUMBER),
    Bug("cache", "receiver_gets_other_data", "pipeline.find_missing_items", receiver_gets_other_data,
        CACHED + "(fields|ids)"),
    Bug("cache", "buffer_written_again", "frames.process", buffer_written_again,
        CACHED + r"fields\['frames'\]\[\d\]\['frames'\]: values differ"),
    Bug("cache", "memory_of_the_caller", "parser.parse_modality", memory_of_the_caller,
        CACHED + r"fields\['(series|frames)'\]\[\d\]\[.*\]: values differ"),
    Bug("text", "text_without_special_tokens", "processor.__call__", partial(_read, []),
        r"the ids of a text and, by the processor, the text '.*': ids: \d+ and \d+ long"),
    Bug("text", "text_in_lower_case", "info.get_default_tok_params",
        lambda inherited: replace(inherited(), do_lower_case=True),
        r"the ids of a text and, by the renderer, the text '.*': ids: \[.*\] and \[.*\]"),
    Bug("text", "text_begun_twice", "processor.__call__", partial(_read, ["<s>", "<s>"]),
        r"the ids of a text and, by the processor, the text '.*': ids: \d+ and \d+ long"),
    Bug("text", "a_token_more_than_the_text", PLACING, _prompted(begun_with_another_token),
        r"outside its items the prompt has \[1, 13.*\], and the ids of the text are \[1, .*\]"),
    Bug("independence", "padded_to_the_batch", "series",
        lambda: {"process": _padded, "fields": {"values": batched(), "length": batched()}},
        r"series\[\d\] alone and in this request: \['values'\]: torch.float32 \(\d, 2\) and torch.float32 \(\d, 2\)"),
    Bug("independence", "normalised_over_the_batch", "frames.process", normalised_over_the_batch,
        r"frames\[\d\] alone and in this request: \['frames'\]: values differ"),
    Bug("independence", "fast_path_for_several", "frames.process", fast_path_for_several,
        r"frames\[\d\] alone and in this request: \['frames'\]: values differ"),
    Bug("independence", "field_of_the_index", "frames", field_of_the_index,
        r"frames\[\d\] alone and in this request: \['position'\]: values differ"),
    Bug("independence", "options_of_another_modality", "subject", options_of_another_modality,
        r"(image|video)\[\d\] (alone and in this request: .* values differ|has \d embed positions alone and \d)"),
    Bug("worst_case", "stated_maximum_too_small", STATED, _stated(-1),
        r"(3 rows are stated for series, and the dummy item has 4|1 rows .* for frames, and .* has 2)"),
    Bug("worst_case", "stated_maximum_too_large", STATED, _stated(+1),
        r"(5 rows are stated for series, and the dummy item has 4|3 rows .* for frames, and .* has 2)"),
    Bug("worst_case", "largest_of_fewer_rows", "series",
        lambda: {"item": Tensor(shape=(between(1, 4), 2), bound=8.0, largest=(3, 2))},
        r"is refused: .* at most 3 encoder row\(s\), as the stated largest item has, got 4"),
    Bug("worst_case", "dummy_of_several_modalities", "dummy_inputs.get_dummy_mm_data", dummy_of_several_modalities,
        r"KeyError: '(series|frames)'"),
    Bug("identity", "hash_of_the_shape", HASHES, hash_of_the_shape, r"TensorSample\(seed=1, .*\) has the same hash"),
    Bug("identity", "hash_of_the_container", "parser.parse_modality", hash_of_the_container,
        r"the same content as (ndarray|list) (has another hash|is refused)"),
    Bug("identity", "hash_of_the_file", "subject", lambda: another_llava(("hash_items", hash_of_the_file)),
        r"a file decoded on white and on black \(rgba_background_color\): one hash"),
    Bug("round_trip", "field_left_out", "pipeline.make_kwargs_item", field_left_out,
        r"series\[0\] has \['length', 'values'\], declared are \['length', 'values', 'version'\]"),
    Bug("independence", "flat_sizes_in_the_wrong_order", PROCESSING,
        partial(_split, lambda rows, sizes: rows.split(sizes[::-1])),
        r"series\[\d\] alone and in this request: \['values'\]: .*\(\d, 2\) and .*\(\d, 2\)"),
    Bug("independence", "split_along_another_dimension", PROCESSING,
        partial(_split, lambda rows, sizes: rows.chunk(len(sizes), dim=1) if len(sizes) == 2 else rows.split(sizes)),
        r"series\[\d\] alone and in this request: \['values'\]: .*"),
    Bug("refusal", "surplus_items_accepted", "processor.apply", surplus_items_accepted,
        r"one item of frames too many: accepted"),
    Bug("refusal", "missing_items_accepted", "processor.apply", missing_items_accepted,
        r"one item of frames too few: accepted"),
    Bug("refusal", "nan_accepted", "parser.parse_modality",
        lambda inherited, modality, data: _mended(inherited, modality, data, lambda value: value.nan_to_num()),
        r"NaN in an item of (series|frames): accepted"),
    Bug("refusal", "bound_ignored", "parser.parse_modality",
        lambda inherited, modality, data: _mended(inherited, modality, data, lambda value: value.clamp(-8, 8)),
        r"a value beyond the bound in an item of (series|frames): accepted"),
    Bug("refusal", "index_beyond_its_part", "parser.parse_modality", index_beyond_its_part,
        r"a value beyond the bound in click of frames: accepted", spec=PAGE),
    Bug("refusal", "unknown_modality_ignored", "info.parse_mm_data", unknown_modality_ignored,
        r"an unknown modality: accepted"),
    Bug("refusal", "message_without_modality", "info.parse_mm_data", message_without_modality,
        r": the message names no modality: request: expected well-formed items"),
    Bug("refusal", "special_token_of_a_text", "frames", lambda: noted(as_the_tokenizer_reads_it),
        r"'</?\w+>' in note of frames: the layout has 1 of this token, and 0 with another text"),
    Bug("refusal", "placeholder_of_a_text", "parser.parse_modality", placeholder_of_a_text,
        r"'<(pad|row|frame|series)>' in note of frames: accepted", spec=NOTED),
    Bug("refusal", "refused_by_a_crash", "parser.parse_modality",
        lambda inherited, modality, data: hash_of_the_container(inherited, modality, data),
        r"as an item of (series|frames): refused with (TypeError|RuntimeError|ValueError|AttributeError): "),
    Bug("idempotence", "double_expansion", PLACING, targets_replaced_without_a_look, r"\d+ ids became \d+",
        spec=ModelSpec("double", frames(layout=tok["<frame>"] + embed(tok["<pad>"]) * 2))),
    Bug("idempotence", "turn_ended_again", "subject",
        lambda: mixed(ModelSpec("mixed", series(), frames(), prompt=lambda s: [*s.prompt, ID["</s>"]])),
        r"\d+ ids became \d+"),
    Bug("idempotence", "expanded_prompt_refused", PLACING, expanded_prompt_refused,
        r"refused with InputError: mixed\.frames"),
    Bug("embeds", "embeddings_with_another_range", "frames",
        lambda: {"embeds": embed(tok["<pad>"]) * item.rows + tok["<close>"]},
        r"the raw item and its embeddings: ranges\['frames'\]"),
    Bug("embeds", "embeddings_that_raise", "pipeline.convert_fields", embeddings_that_raise,
        r"embeddings of frames pass the parser, then KeyError: 'frames'"),
    Bug("embeds", "embeddings_refused", "parser.parse_modality", embeddings_taken_for_items,
        r"the spec takes embeddings of frames, and the parser refuses them: mixed\.frames"),
    Bug("safety", "placeholders_sampled", "model.masked", lambda inherited, logits: logits,
        r"placeholder ids \[4, 5\] can be sampled"),
    Bug("safety", "placeholders_of_one_modality_sampled", "model.masked",
        lambda inherited, logits: logits.index_fill(-1, torch.tensor(ID["<pad>"]), -torch.inf),
        r"placeholder ids \[5\] can be sampled"),
    Bug("safety", "crash_outside_the_vocabulary", "model.known", lambda inherited, input_ids: input_ids,
        r"ids \[4, 5, -1, 32, 2147483647\] in a prompt: IndexError"),
    Bug("safety", "bare_placeholders_as_nan", "model.embed_input_ids", bare_placeholders_as_nan,
        r"ids \[4, 5, -1, 32, 2147483647\] are embedded as NaN"),
    Bug("containment", "rows_that_are_not_finite", "model.sound", lambda inherited, rows: rows,
        r"in torch.float32, beside an item of (nan|-?inf), the language model gets NaN"),
    Bug("containment", "rows_too_large_for_the_dtype", "model.sound",
        lambda inherited, rows: [row.nan_to_num() for row in rows],
        r"the language model gets [\d.e+]+ and can take (16384|9.0072e\+15)"),
    Bug("containment", "one_bad_item_spoils_the_batch", "model.sound",
        lambda inherited, rows: rows if torch.cat(rows).isfinite().all() else [torch.zeros_like(row) for row in rows],
        r"(series|frames)\[0\] has other rows than alone"),
    Bug("containment", "normalised_over_a_batch_of_requests", "model.sound",
        lambda inherited, rows: inherited([row / torch.cat(rows).norm() for row in rows]),
        r"(series|frames)\[0\] has other rows than alone"),
    Bug("strangers", "items_of_one_length", "model.embed_multimodal",
        lambda inherited, **fields: list(torch.stack(list(inherited(**fields)))),
        r"items of series of two requests in one batch: RuntimeError: stack expects each tensor to be equal size"),
    Bug("strangers", "statistics_of_the_batch", "model.sound",
        lambda inherited, rows: inherited([row - torch.cat(rows).mean() for row in rows]),
        r"items of (series|frames) of two requests in one batch: number \d has other rows than alone"),
    Bug("strangers", "rows_in_another_order", "model.sound",
        lambda inherited, rows: inherited(sorted(rows, key=lambda row: float(row[0, 0]))),
        r"items of (series|frames) of two requests in one batch: number \d has other rows than alone"),
    Bug("strangers", "embeddings_of_one_length", "series",
        lambda: {"embeds": tok["<open>"] + embed(tok["<row>"]) * item.rows + tok["<close>"]},
        r"items of series of two requests in one batch: RuntimeError: stack expects each", model=OneLength),
    Bug("strangers", "integers_by_an_option", "subject", integers_by_an_option,
        r"items of frames of two requests in one batch: TypeError: torch.cat\(\): input types can't be cast"),
    Bug("reference", "token_that_the_reference_lacks", "subject",
        lambda: another_llava(layout=embed(cfg.image_token_index) * 16 + tok["</s>"]),
        r"the Hugging Face processor and vLLM, of '.*<image>.*': ids: "),
    Bug("reference", "positions_beside_the_reference", "subject",
        lambda: another_llava(layout=embed(cfg.image_token_index) * 17),
        r"the Hugging Face processor and vLLM, of '.*<image>.*': ids: \d+ and \d+ long"),
    Bug("reference", "channels_in_another_order", "subject",
        lambda: another_llava(process=flipped_channels),
        r"of '.*<image>.*': the field 'pixel_values' has other values"),
    Bug("positions", "height_and_width_swapped", "subject", lambda: another_qwen("image", lambda t, h, w: (t, w, h)),
        ELSEWHERE),
    Bug("positions", "next_token_one_too_far", "subject",
        lambda: another_qwen(change=lambda inherited, *given: (inherited(*given)[0], inherited(*given)[1] + 1)),
        r"the token after the prompt is at \d+, and in Qwen2VLModel at \d+"),
    Bug("positions", "second_item_numbered_as_text", "subject",
        lambda: another_qwen(change=lambda inherited, ids, items: inherited(ids, items[:1])),
        r"token \d+ is at \[(\d+), \1, \1\], and in Qwen2VLModel at \["),
    Bug("positions", "positions_of_what_follows", "subject", lambda: another_qwen(change=items_of_the_whole_prompt),
        r"token \d+ is at \[.*\], and of the first \d+ alone at \["),
    Bug("outputs", "columns_taken_for_rows", "subject",
        with_pixels(encode=lambda array, _: array.T.reshape(-1) + BLACK),
        r"before and after encode and decode: array: values differ"),
    Bug("outputs", "more_ids_than_shades", "subject",
        with_pixels(decode=lambda ids, _: _SHADES[ids.reshape(2, 3) - BLACK],
                    encode=lambda array, _: np.searchsorted(_SHADES, array.reshape(-1)) + BLACK),
        r"mixed\.outputs\.pixels, decode: expected .* IndexError: index 7 is out of bounds"),
    Bug("outputs", "picture_kept_in_one_place", "subject", with_pixels(decode=picture_kept_in_one_place),
        r"before and after other ids are decoded: array: values differ"),
    Bug("outputs", "black_rows_cut_off", "subject",
        with_pixels(decode=black_rows_cut_off, encode=lambda array, _: np.full(6, BLACK)),
        r"int64 \(\d, 3\), and of the smallest ids int64 \(0, 3\)"),
]  # fmt: skip


# -- what catches what -------------------------------------------------------------------------------------------------


def violation(law: str, subject: Subject, examples: int, *, shrink: bool = False) -> str | None:
    """What a law says of a subject; None if it says nothing. The same every time."""
    with profile(derandomize=True, phases=[Phase.generate, *[Phase.shrink] * shrink]):
        try:
            check_law(law, subject, examples=examples)
        except Violation as error:
            return str(error)
        except NotApplicable:
            pass
    return None
