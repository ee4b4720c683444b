"""The correct base of planted bugs: specs, model classes, a checkpoint, and the subjects that laws check."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from vllm import ModelRegistry
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmkit import (
    Image,
    List,
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
    each,
    embed,
    fields,
    flat,
    hf,
    item,
    kwargs,
    literal,
    optional,
    tok,
    where,
)
from mmkit import replace as replaces
from mmkit.plan.soundness import compute_largest_magnitude
from mmkit.testing import ImageSample, Subject, VideoSample, of_spec
from tests.oracles import SYSTEMS
from tests.random_specs import write_checkpoint

# -- the vocabulary ----------------------------------------------------------------------------------------------------

NUMBERED = ["<|series_1|>", "<|series_2|>", "<|series_3|>", "<|series_4|>"]
SPECIAL = ["<unk>", "<s>", "</s>", "<frame>", "<pad>", "<row>", "<open>", "<close>", "<series>"] + NUMBERED
TOKENS = SPECIAL + list("abcABC")
ID = {word: token for token, word in enumerate(TOKENS)}
VOCABULARY = 32
HIDDEN = 8
BLACK = 20
"""The first of the ids that come out as pixels."""


@cache
def checkpoint(architecture: str = "PlantedForCausalLM", tokenizer: bool = True) -> Path:
    """Make a folder with a tiny config and, for text, a tokenizer of whole words that begins every text with <s>."""
    return write_checkpoint(
        Path(tempfile.mkdtemp(prefix="mmkit-planted-")),
        TOKENS if tokenizer else [],
        SPECIAL[3:],
        begins=tokenizer,
        architectures=[architecture],
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        pad_token_id=31,
    )


# -- specs -------------------------------------------------------------------------------------------------------------


def series(**changes: Any) -> Modality:
    """Return a modality of (1..4, 2) tensors, in place of <series>."""
    parts: dict[str, Any] = {
        "item": Tensor(shape=(between(1, 4), 2), bound=8.0),
        "layout": tok["<open>"] + embed(tok["<row>"]) * fields.length + tok["<close>"],
        "update": replaces(tok["<series>"]),
        "fields": {
            "values": flat(fields.length),
            "length": batched(keep_on_cpu=True),
            "version": constant(7, dtype="int64"),
        },
        "process": process_series,
        "limit": 4,
        **changes,
    }
    return Modality("series", **parts)


def process_series(items: Any, scope: Any) -> dict[str, Any]:
    """Repeat each row `repeat` times, times `scale`: both are options of the request."""
    repeat = scope.kwargs.get("repeat", 1)
    scale = scope.kwargs.get("scale", 1)
    tensors = [value.repeat_interleave(repeat, dim=0) * scale for value in items]
    lengths = [torch.tensor(len(tensor)) for tensor in tensors]
    return {"values": torch.cat(tensors), "length": lengths}


def frames(**changes: Any) -> Modality:
    """Return a modality of (2, 3) tensors, or embeddings of two rows, in place of <frame>."""
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


def pixels(decode: Any = None, encode: Any = None) -> Output:
    """Return an output of two rows of three pixels in eight shades, with <close> after each."""
    ids = (any_id(BLACK, BLACK + 8) * 3 + tok["<close>"]) * 2
    return Output("pixels", ids, decode or decode_pixels, encode or encode_pixels)


def decode_pixels(ids: Any, scope: Any) -> Any:
    return ids.reshape(2, 3) - BLACK


def encode_pixels(array: Any, scope: Any) -> Any:
    return array.reshape(-1) + BLACK


def strokes(decode: Any = None, encode: Any = None) -> Output:
    """Return an output in a text: one to four points of two shades, from <open> to <close>."""
    point = any_id(BLACK, BLACK + 8) + any_id(BLACK + 2, BLACK + 6)
    functions = (decode or decode_strokes, encode or encode_strokes)
    return Output("strokes", point, *functions, after=tok["<open>"], until=tok["<close>"], most=4)


def decode_strokes(ids: Any, scope: Any) -> Any:
    return ids.reshape(-1, 2) - BLACK


def encode_strokes(array: Any, scope: Any) -> Any:
    return array.reshape(-1) + BLACK


MIXED = ModelSpec("mixed", series(), frames(), outputs=[pixels(), strokes()])
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


def join_strokes(items: Any, scope: Any) -> dict[str, Any]:
    """Join the strokes of each drawing, behind its mark with zeros in place of absent numbers."""
    drawings = []
    for value in items:
        mark = torch.zeros(1, 2)
        if value["mark"] is not None:
            mark[0, : len(value["mark"])] = value["mark"]
        drawings.append(torch.cat([mark, *value["strokes"]]))
    return {"drawing": drawings}


LISTED = ModelSpec(
    "listed",
    frames(
        item=Record(
            strokes=List(Tensor((between(1, 3), 2)), most=3), mark=optional(Tensor((between(0, 2),), bound=2.0))
        ),
        layout=embed(tok["<pad>"])
        + each(item.strokes.elements, lambda stroke: tok["<open>"] + embed(tok["<pad>"]) * stroke.length)
        + where(item.mark, tok["<close>"], []),
        fields={"drawing": batched()},
        process=join_strokes,
        embeds=False,
    ),
)
"""A list of strokes, and perhaps a mark of up to two numbers."""


def frames_with_notes(encode: Callable[[Any, str], list[int]]) -> Modality:
    """Return frames with a note, whose ids stand behind the placeholders.

    Args:
        encode: a function of a scope and a note that returns these ids.
    """

    def process(items: Any, scope: Any) -> dict[str, Any]:
        notes = []
        for value in items:
            notes.append(torch.tensor(encode(scope, value["note"]), dtype=torch.int64))
        return {"frames": [value["frames"] for value in items], "note": notes}

    return frames(
        item=Record(frames=Tensor(shape=(2, 3)), note=Text(most=12, alphabet="abc <>/adeilmnoprsuw")),
        layout=embed(tok["<pad>"]) * 2 + fields.note,
        fields={"frames": batched(), "note": batched(hidden=True)},
        process=process,
        embeds=False,
    )


def encode_as_plain_text(scope: Any, text: str) -> list[int]:
    return scope.tok.text("{}", text)


NOTED = ModelSpec("noted", frames_with_notes(encode_as_plain_text))


def frames_with_laid_out_notes(layout: Any) -> Modality:
    """Return frames with a note that the layout itself reads, behind the placeholders."""
    return frames_with_notes(encode_as_plain_text).model_copy(
        update={
            "layout": embed(tok["<pad>"]) * 2 + layout,
            "fields": {"frames": batched()},
            "process": take_frames,
        }
    )


def take_frames(items: Any, scope: Any) -> dict[str, Any]:
    return {"frames": [value["frames"] for value in items]}


LAID_OUT_NOTES = ModelSpec("noted", frames_with_laid_out_notes(tok.text("a {} b", item.note.text)))


def make_beats(items: Any, scope: Any) -> dict[str, Any]:
    """Make one of the tokens a to C of each number."""
    return {"beats": [value + ID["a"] for value in items]}


BEATS = Modality(
    "beats",
    item=Tensor((between(1, 3),), "int64", bound=between(0, 5)),
    layout=literal(tok["<open>"], fields.beats, tok["<close>"]),
    update=replaces(tok["<series>"]),
    fields={"beats": batched()},
    process=make_beats,
    limit=3,
)
"""Items that become ids only."""

HEART = ModelSpec("heart", frames(), BEATS)
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


# -- model classes -----------------------------------------------------------------------------------------------------


class Body(nn.Module):
    """A language model as far as the laws look: a table of embeddings, and a head."""

    def __init__(self, vocabulary: int = VOCABULARY, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, hidden)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.table.weight.T


class Encoders(nn.Module):
    """The encoders of both modalities, and a language model that is never run."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = Body()
        self.series_projection = nn.Linear(2, HIDDEN)
        self.frames_projection = nn.Linear(3, HIDDEN)

    def get_language_model(self) -> Any:
        return self.body

    def embed_series(self, values: torch.Tensor, length: Any, version: Any) -> Any:
        rows = self.series_projection(values.to(self.series_projection.weight.dtype))
        return rows.split([int(count) for count in length])

    def embed_frames(self, frames: torch.Tensor) -> Any:
        return self.frames_projection(frames.to(self.frames_projection.weight.dtype))

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Any:
        raise NotImplementedError


class Derived(MultiModalModel, Encoders):
    """A correct model class by mmkit's mixin."""


class ByHand(Encoders, SupportsMultiModal):
    """A correct model class written by hand, without the mixin's checks."""

    def embed_multimodal(self, **fields: Any) -> Any:
        rows: list[torch.Tensor] = []
        if "values" in fields:
            rows += self.embed_series(fields["values"], fields["length"], None)
        if "frames" in fields:
            rows += self.embed_frames(fields["frames"])
        rows += fields.get("frames_embeds", ())
        return self.replace_unsound(rows)

    def replace_unsound(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Replace the rows of an item that are not finite, or too large, by zeros."""
        bound = compute_largest_magnitude(self.body.table.weight.dtype)
        sound = []
        for of_item in rows:
            if of_item.abs().amax() <= bound:
                sound.append(of_item)
            else:
                sound.append(torch.zeros_like(of_item))
        return sound

    def embed_input_ids(self, input_ids: Any, multimodal_embeddings: Any = None, *, is_multimodal: Any = None) -> Any:
        embeds = self.body.embed_input_ids(self.clamp_ids(input_ids))
        if multimodal_embeddings:
            embeds[is_multimodal] = torch.cat(multimodal_embeddings).to(embeds.dtype)
        return embeds

    def clamp_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids.clamp(0, VOCABULARY - 1)

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        return self.mask_placeholders(self.body.compute_logits(hidden_states))

    def mask_placeholders(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([ID["<pad>"], ID["<row>"]]), -torch.inf)


# -- subjects ----------------------------------------------------------------------------------------------------------


def make_mixed(spec: ModelSpec = MIXED, **classes: type) -> Subject:
    """Return the subject of `MIXED`, or of another spec, with these classes in place of the generated ones."""
    return of_spec(spec, checkpoint(), kwargs=KWARGS, classes=spec.classes._replace(**classes))


def with_model(model: type, spec: ModelSpec = MIXED, kwargs: Any = KWARGS, **classes: type) -> Subject:
    """Return the subject of a spec with a model class, which is registered with vLLM."""
    folder = checkpoint(register(model, spec))
    return of_spec(spec, folder, kwargs=kwargs, classes=spec.classes._replace(**classes))


_numbers = itertools.count()


def register(model: type, spec: ModelSpec) -> str:
    """Register a model class of a spec with vLLM under a new name, and return the name.

    vLLM keeps what it has found out of an architecture, so no name comes twice.
    """
    name = f"{model.__name__}{next(_numbers)}ForCausalLM"
    registered = type(name, (model,), {"mm_spec": spec, "__module__": __name__})
    classes = spec.classes
    classes.processor.sends_row_counts = issubclass(model, MultiModalModel)
    decorate = MULTIMODAL_REGISTRY.register_processor(
        classes.processor, info=classes.info, dummy_inputs=classes.dummy_inputs
    )
    ModelRegistry.register_model(name, decorate(registered))
    return name


def with_derived_model() -> Subject:
    return with_model(Derived)


def with_model_by_hand() -> Subject:
    return with_model(ByHand)


def robot() -> Subject:
    return of_spec(ROBOT, checkpoint(tokenizer=False))


def heart(spec: ModelSpec = HEART) -> Subject:
    return of_spec(spec, checkpoint(), kwargs=st.just({}))


BASES: dict[str, Callable[[], Subject]] = {"mixed": with_derived_model, "by hand": with_model_by_hand, "robot": robot}
"""Correct ones, of which every law holds."""


# -- two modalities of one processor -----------------------------------------------------------------------------------


class Scale:
    """A processor of transformers: pixels in the corner of images and videos, times an option."""

    def __call__(self, images=(), videos=(), scale=1, return_tensors=None):
        pictures = [take_corner(image) * scale for image in images]
        clips = [take_corner(video) * scale for video in videos]
        return {"pictures": pictures, "clips": clips}


def take_corner(value: Any) -> torch.Tensor:
    pixels = np.asarray(value).astype(np.float32)
    return torch.from_numpy(pixels[..., :1, :1, :])


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


def media(**classes: type) -> Subject:
    """Return the subject of `MEDIA`, with these classes in place of the generated ones."""
    options = st.sampled_from([{}, {"scale": 2}, {"rows": 3}])
    return of_spec(MEDIA, checkpoint(), kwargs=options, classes=MEDIA.classes._replace(**classes))


# -- models of vLLM ----------------------------------------------------------------------------------------------------

LLAVA_IMAGES = st.builds(ImageSample, st.integers(0, 2), st.integers(1, 40), st.integers(1, 40))
SEEDS = st.integers(0, 2)
QWEN_SIDE = st.integers(56, 112)  # two squares at least; an image and a frame have as many
QWEN_SAMPLES = {
    "image": st.builds(ImageSample, SEEDS, QWEN_SIDE, QWEN_SIDE),
    "video": st.builds(VideoSample, SEEDS, st.integers(1, 4), QWEN_SIDE, QWEN_SIDE),
}


def llava(change_processor: Callable[[type], type] | None = None, **changes: Any) -> Subject:
    """Return LLaVA with its Hugging Face processor, with another processor class, or another declaration.

    Args:
        change_processor: a function of the generated processor class that returns another.
        changes: of the declaration of images.
    """
    system = SYSTEMS["llava"]
    (image,) = system.load_spec().modalities
    spec = ModelSpec("llava", image.model_copy(update=changes))
    classes = spec.classes
    if change_processor is not None:
        classes = classes._replace(processor=change_processor(classes.processor))
    return of_spec(spec, system.checkpoint, classes=classes, samples={"image": LLAVA_IMAGES})


def qwen(model: type | None = None, positions: dict[str, Any] | None = None) -> Subject:
    """Return Qwen2-VL with its Hugging Face model.

    Args:
        model: a model class in place of vLLM's.
        positions: the grids of modalities that are declared otherwise, by name.
    """
    system = SYSTEMS["qwen2_vl"]
    modalities = []
    for modality in system.load_spec().modalities:
        if positions is not None and modality.name in positions:
            modality = modality.model_copy(update={"positions": positions[modality.name]})
        modalities.append(modality)
    spec = ModelSpec("qwen2_vl", *modalities)
    options: dict[str, Any] = {}
    if model is not None:
        options["hf_overrides"] = {"architectures": [register(model, spec)]}
    return of_spec(spec, system.checkpoint, samples=QWEN_SAMPLES, **options)
