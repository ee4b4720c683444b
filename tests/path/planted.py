"""Planted bugs: what people get wrong in a processor, a spec or a model, each with the law that must catch it.

A bug changes one thing in a correct base: `MIXED` (two modalities, text, kwargs) or `ROBOT` (ids only, placeholders
written by the caller) over a made-up checkpoint. ``python -m tests.path.planted`` writes
the table of them, docs/planted-bugs.md.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import Phase
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast
from vllm import ModelRegistry
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.processing import BaseMultiModalProcessor

from mmkit import (
    InputError,
    Modality,
    ModelSpec,
    MultiModalModel,
    Tensor,
    batched,
    between,
    cfg,
    embed,
    flat,
    fmt,
    in_place,
    item,
    out,
    shared,
    tok,
)
from mmkit import replace as replaces
from mmkit.testing import LAWS, NotApplicable, Subject, Violation, check_law, of_spec
from mmkit.vllm_api.common import EmbedItems, Parser, TensorItems
from tests.profiles import profile

# -- the correct base --------------------------------------------------------------------------------------------------

NUMBERED = [f"<|series_{i}|>" for i in range(1, 5)]
SPECIAL = ["<unk>", "<s>", "</s>", "<frame>", "<pad>", "<row>", "<open>", "<close>", "<series>", *NUMBERED]
TOKENS = [*SPECIAL, *"abcABC"]
ID = {word: i for i, word in enumerate(TOKENS)}
VOCABULARY, HIDDEN = 32, 8


def _series(items: Any, scope: Any) -> dict[str, Any]:
    """Each row `repeat` times, times `scale`: both are options of the request."""
    repeat, scale = scope.kwargs.get("repeat", 1), scope.kwargs.get("scale", 1)
    made = [value.repeat_interleave(repeat, dim=0) * scale for value in items]
    return {"values": torch.cat(made), "length": [torch.tensor(len(v)) for v in made], "version": torch.tensor(7)}


def series(**changes: Any) -> Modality:
    """(1..4, 2) tensors, in place of <series>."""
    parts: dict[str, Any] = {
        "item": Tensor(shape=(between(1, 4), 2), bound=8.0),
        "layout": tok["<open>"] + embed(tok["<row>"]) * out.length + tok["<close>"],
        "update": replaces(tok["<series>"]),
        "fields": {"values": flat(out.length), "length": batched(keep_on_cpu=True), "version": shared()},
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


MIXED = ModelSpec("mixed", series(), frames())
BY_NUMBER = ModelSpec("mixed", series(update=replaces(tok[fmt("<|series_{}|>", item.index + 1)])), frames())
ROBOT = ModelSpec(
    "robot",
    Modality(
        "actions",
        item=Tensor(shape=(3, 2), bound=0.1),
        layout=embed(cfg.pad_token_id) * 3,
        update=in_place(),
        fields={"actions": batched(shape=(3, 2), dtype="float32")},
        limit=3,
    ),
)
KWARGS: Any = st.sampled_from([{}, {"scale": 2}, {"repeat": 2}])


class Body(nn.Module):
    """A language model as far as the laws look: a table of embeddings, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, HIDDEN)

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
        return self.series_projection(values).split([int(n) for n in length])

    def embed_frames(self, frames: torch.Tensor) -> Any:
        return self.frames_projection(frames)

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
        return rows

    def embed_input_ids(self, input_ids: Any, multimodal_embeddings: Any = None, *, is_multimodal: Any = None) -> Any:
        return self.body.embed_input_ids(input_ids.clamp(0, VOCABULARY - 1))

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        return self.body.compute_logits(hidden_states).index_fill(
            -1, torch.tensor([ID["<pad>"], ID["<row>"]]), -torch.inf
        )


_numbers = itertools.count()
_folders: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def checkpoint(architecture: str = "PlantedForCausalLM", tokenizer: bool = True) -> Path:
    """A folder with a tiny config and, for text, a tokenizer of whole words that begins every text with <s>."""
    holder = tempfile.TemporaryDirectory(prefix="mmkit-planted-")  # removed when the interpreter exits
    _folders.append(holder)
    folder = Path(holder.name)
    if tokenizer:
        words = Tokenizer(models.WordLevel(ID, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ID["<s>"])])
        fast = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        fast.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
        fast.save_pretrained(folder)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 31}
    config = {"model_type": "llama", "architectures": [architecture], **sizes, **heads}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mixed(spec: ModelSpec = MIXED, **classes: type) -> Subject:
    """`MIXED`, or another spec, with subclasses of the generated classes in their place."""
    return of_spec(spec, checkpoint(), kwargs=KWARGS, **classes)


def robot(spec: ModelSpec = ROBOT, **classes: type) -> Subject:
    """`ROBOT`, or another spec of a model without a tokenizer, likewise."""
    return of_spec(spec, checkpoint(tokenizer=False), **classes)


def with_model(model: type, spec: ModelSpec = MIXED) -> Subject:
    """A spec with a model class, in vLLM's registries."""
    name = f"{model.__name__}{next(_numbers)}ForCausalLM"  # vLLM keeps what it has found out of an architecture
    named = type(name, (model,), {"mm_spec": spec, "__module__": __name__})
    made = spec.classes
    MULTIMODAL_REGISTRY.register_processor(made.processor, info=made.info, dummy_inputs=made.dummy_inputs)(named)
    ModelRegistry.register_model(name, named)
    return of_spec(spec, checkpoint(name), kwargs=KWARGS)


BASES: dict[str, Callable[[], Subject]] = {
    "mixed": functools.partial(with_model, Derived),
    "by hand": functools.partial(with_model, ByHand),
    "robot": robot,
}
"""Correct ones, of which every law holds."""

Info, Processor = MIXED.classes.info, MIXED.classes.processor


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bug:
    """One planted bug.

    Attributes:
        name: of the function that makes it.
        sentence: what is wrong.
        law: the number of the law that must catch it.
        message: a regular expression for what that law says.
        subject: makes the broken thing.
    """

    name: str
    sentence: str
    law: str
    message: str
    subject: Callable[[], Subject]


BUGS: list[Bug] = []


def planted(law: str, message: str) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    """Add a function that makes something broken to the table; its docstring says what is wrong."""

    def add(make: Callable[[], Subject]) -> Callable[[], Subject]:
        BUGS.append(Bug(make.__name__, str(make.__doc__), law, message, make))
        return make

    return add


# -- L1: encoder rows and layout ---------------------------------------------------------------------------------------


@planted("L1", r"frames\[0\] has 2 encoder rows and 3 embed positions")
def layout_longer_than_the_rows() -> Subject:
    """The layout has three positions for an item of which the encoder makes two rows."""
    return with_model(ByHand, ModelSpec("longer", series(), frames(layout=embed(tok["<pad>"]) * 3)))


@planted("L1", r"longer\.frames, embed_frames, item 0: expected 3 encoder rows, got 2")
def layout_longer_than_the_rows_of_a_mixin() -> Subject:
    """The same, in a model class whose mixin looks itself."""
    return with_model(Derived, ModelSpec("longer", series(), frames(layout=embed(tok["<pad>"]) * 3)))


@planted("L1", r"series\[0\] has 1 encoder rows and 2 embed positions")
def literal_in_the_mask() -> Subject:
    """The mask marks a literal token before the placeholders as one of them."""
    marked = embed(tok["<open>"]) + embed(tok["<row>"]) * out.length + tok["<close>"]
    return with_model(ByHand, ModelSpec("marked", series(layout=marked), frames()))


@planted("L1", r"\[0\] has \d encoder rows and \d embed positions")
def truncated_rows() -> Subject:
    """The encoder leaves out the last row of every item."""

    class Truncated(ByHand):
        def embed_multimodal(self, **fields: Any) -> Any:
            return [rows[:-1] for rows in super().embed_multimodal(**fields)]

    return with_model(Truncated)


@planted("L1", r"0 encoder outputs for 1 items of (frames|series)")
def one_output_fewer_than_items() -> Subject:
    """The encoder makes rows for all items but the last of a batch."""

    class Fewer(ByHand):
        def embed_multimodal(self, **fields: Any) -> Any:
            return super().embed_multimodal(**fields)[:-1]

    return with_model(Fewer)


@planted("L1", r"\d encoder outputs for \d items of (frames|series)|\[0\] has 8 encoder rows and 1 embed positions")
def rows_of_all_items_in_one() -> Subject:
    """The encoder returns the rows of all items as one tensor."""

    class InOne(ByHand):
        def embed_multimodal(self, **fields: Any) -> Any:
            return torch.cat(super().embed_multimodal(**fields))

    return with_model(InOne)


# -- L2: ranges --------------------------------------------------------------------------------------------------------


def _places(found: Mapping[str, list[Any]], change: Callable[[Any], Any]) -> dict[str, list[Any]]:
    return {name: [change(place) for place in places] for name, places in found.items()}


@planted(
    "L2", r"(series|frames)\[0\] ends at (\d+), past \d+ ids|the ids at (series|frames)\[0\] are \[.*\], its layout"
)
def range_off_by_one() -> Subject:
    """Ranges begin one position late, as after a forgotten special token."""

    class Late(Processor):
        def _apply_prompt_updates(self, token_ids: Any, mm_prompt_updates: Any) -> Any:
            ids, found = super()._apply_prompt_updates(token_ids, mm_prompt_updates)
            return ids, _places(found, lambda place: replace(place, start_idx=place.start_idx + 1))

    return mixed(processor=Late)


@planted("L2", r"\[\d\] (at \d+ begins inside the range before it, which ends at \d+|are \[.*\], its layout is \[)")
def overlapping_ranges() -> Subject:
    """All items of a modality get the range of the first."""

    class Overlapping(Processor):
        def _apply_prompt_updates(self, token_ids: Any, mm_prompt_updates: Any) -> Any:
            ids, found = super()._apply_prompt_updates(token_ids, mm_prompt_updates)
            first = {name: places[0].start_idx for name, places in found.items()}
            return ids, _places(found, lambda place: replace(place, start_idx=first[place.modality]))

    return mixed(processor=Overlapping)


@planted("L2", r"outside the ranges the prompt is \[.*\], the caller's \[.*\]")
def end_of_the_prompt_dropped() -> Subject:
    """What follows the last item is cut off."""

    class Cut(Processor):
        def _apply_prompt_updates(self, token_ids: Any, mm_prompt_updates: Any) -> Any:
            ids, found = super()._apply_prompt_updates(token_ids, mm_prompt_updates)
            return ids[: max(place.start_idx + place.length for places in found.values() for place in places)], found

    return mixed(processor=Cut)


@planted("L2", r"outside the ranges the prompt is \[.*\], the caller's \[.*\]")
def prompt_in_lower_case() -> Subject:
    """The prompt goes through text on its way, in lower case."""

    class Lower(Processor):
        def _postprocess_prompt(self, prompt: list[int]) -> list[int]:
            return [ID.get(TOKENS[token].lower(), token) if token < len(TOKENS) else token for token in prompt]

    return mixed(processor=Lower)


@planted("L2", r"outside the ranges the prompt is \[.*\], the caller's \[1, .*\]")
def first_token_removed() -> Subject:
    """The token that begins every text is taken for a double and removed."""

    class Bare(Processor):
        def _postprocess_prompt(self, prompt: list[int]) -> list[int]:
            return prompt[1:] if prompt[0] == ID["<s>"] else prompt

    return mixed(processor=Bare)


@planted("L2", r"the ids at (series|frames)\[0\] are \[0, .*\], its layout is \[[^0].*\]")
def ids_that_are_not_the_layout() -> Subject:
    """The placeholders are written with another id than the layout has."""

    class Other(Processor):
        def _apply_prompt_updates(self, token_ids: Any, mm_prompt_updates: Any) -> Any:
            ids, found = super()._apply_prompt_updates(token_ids, mm_prompt_updates)
            for places in found.values():
                for place in places:
                    ids[place.start_idx] = ID["<unk>"]
            return ids, found

    return mixed(processor=Other)


@planted("L2", r"the ranges of (series|frames) are not in order")
def items_swapped_in_the_prompt() -> Subject:
    """The first item of a request gets the last range."""

    class Swapped(Processor):
        def _apply_prompt_updates(self, token_ids: Any, mm_prompt_updates: Any) -> Any:
            ids, found = super()._apply_prompt_updates(token_ids, mm_prompt_updates)
            return ids, {name: places[::-1] for name, places in found.items()}

    return mixed(processor=Swapped)


@planted("L2", r"the mask of series\[0\] is not that of its layout")
def mask_lost() -> Subject:
    """The mask of a layout with literal tokens is dropped, so that all positions receive rows."""

    class Unmasked(Processor):
        def _apply_prompt_updates(self, token_ids: Any, mm_prompt_updates: Any) -> Any:
            ids, found = super()._apply_prompt_updates(token_ids, mm_prompt_updates)
            return ids, _places(found, lambda place: replace(place, is_embed=None))

    return mixed(processor=Unmasked)


# -- L3: caches --------------------------------------------------------------------------------------------------------


@planted("L3", r"in one process: fields\['(series|frames)'\]|in two processes: MultiModalCacheMissError: ")
def items_swapped_after_a_hit() -> Subject:
    """Where some item is cached, the items come in another order."""

    class Swapped(Processor):
        def _merge_mm_kwargs(self, cache: Any, mm_hashes: Any, mm_is_cached: Any, *rest: Any, **named: Any) -> Any:
            items, updates = super()._merge_mm_kwargs(cache, mm_hashes, mm_is_cached, *rest, **named)
            hit = any(any(flags) for flags in mm_is_cached.values())
            return MultiModalKwargsItems({k: v[:: -1 if hit else 1] for k, v in items.items()}), updates

    return mixed(processor=Swapped)


def _without_kwargs() -> type:
    class Keyless(Processor):
        def _get_mm_hashes(self, inputs: Any) -> Any:
            return super()._get_mm_hashes(replace(inputs, hf_processor_mm_kwargs={}))

    return Keyless


@planted("L3", r"(?s)without a cache and with one in one process: (fields|ids).*kwargs=")
def kwargs_missing_in_the_cache_key() -> Subject:
    """An item processed under other kwargs is taken from the cache."""
    return mixed(processor=_without_kwargs())


@planted("L3", r"without a cache and with one in one process: (fields\['series'\]\[\d\]\['(values|length)'\]|ids)")
def missing_items_without_their_kwargs() -> Subject:
    """With a cache, items are processed without the kwargs of their request."""

    class Forgetful(Processor):
        def _get_cache_missing_processor_kwargs(self, inputs: Any, mm_is_cached: Any) -> Any:
            return {}

    return mixed(processor=Forgetful)


@planted("L3", r"without a cache and with one in one process: hashes\['series'\]\[0\]")
def process_writes_into_its_input() -> Subject:
    """The process function scales the caller's tensor in place, so that its hash is another one afterwards."""

    def scaled(items: Any, scope: Any) -> dict[str, Any]:
        return _series([value.mul_(2) for value in items], scope)

    return mixed(ModelSpec("scaled", series(process=scaled), frames()))


@planted(
    "L3", r"with a cache in one process: (InputError|NotFound): mixed\.series|with one in one process: (ids|ranges)"
)
def target_of_another_position() -> Subject:
    """A cached item is looked for at the number that it had in an earlier request."""

    class Stale(BY_NUMBER.classes.processor):  # type: ignore[misc, name-defined]
        def _recompute_cached_prompt_update(self, cached_update: Any, new_item_idx: int) -> Any:
            return replace(cached_update, item_idx=new_item_idx)

    return mixed(BY_NUMBER, processor=Stale)


@planted("L3", r"without a cache and with one in one process: (fields|ids)")
def receiver_gets_other_data() -> Subject:
    """Of the items of a request, the first are processed instead of those that the cache lacks."""

    class First(Processor):
        def _get_cache_missing_items(self, cache: Any, mm_data_items: Any, mm_hashes: Any) -> Any:
            cached, missing = super()._get_cache_missing_items(cache, mm_data_items, mm_hashes)
            for name, part in missing.items():
                part.data = mm_data_items[name].data[: len(part.data)]
            return cached, missing

    return mixed(processor=First)


@planted("L3", r"without a cache and with one in one process: fields\['frames'\]\[\d\]\['frames'\]: values differ")
def buffer_written_again() -> Subject:
    """The process function returns views of a buffer that the next request overwrites."""
    buffer = torch.zeros(8, 2, 3)

    def copied(items: Any, scope: Any) -> dict[str, Any]:
        for i, value in enumerate(items):
            buffer[i] = value
        return {"frames": buffer[: len(items)]}

    return mixed(ModelSpec("copied", series(), frames(process=copied)))


# -- L4: text and tokens -----------------------------------------------------------------------------------------------


@planted("L4", r"the ids of a text and, by the processor, the text '.*': ids: \d+ and \d+ long")
def text_without_special_tokens() -> Subject:
    """A text that goes to the processor itself is tokenized without the token that begins every text."""

    class Bare(Processor):
        def __call__(self, prompt: Any, *rest: Any, **named: Any) -> Any:
            if isinstance(prompt, str):
                prompt = self.info.get_tokenizer().encode(prompt, add_special_tokens=False)
            return super().__call__(prompt, *rest, **named)

    return mixed(processor=Bare)


@planted("L4", r"the ids of a text and, by the renderer, the text '.*': ids: \[.*\] and \[.*\]")
def text_in_lower_case() -> Subject:
    """Texts are tokenized in lower case; the ids of the same text are not changed."""

    class Lower(Info):
        def get_default_tok_params(self) -> Any:
            return replace(super().get_default_tok_params(), do_lower_case=True)

    return mixed(info=Lower)


# -- L5: independence --------------------------------------------------------------------------------------------------


@planted(
    "L5", r"series\[\d\] alone and in this request: \['values'\]: torch.float32 \(\d, 2\) and torch.float32 \(\d, 2\)"
)
def padded_to_the_batch() -> Subject:
    """Items are padded to the longest of the request."""

    def padded(items: Any, scope: Any) -> dict[str, Any]:
        values = nn.utils.rnn.pad_sequence(list(items), batch_first=True)
        return {"values": values, "length": torch.tensor([len(value) for value in items])}

    fields = {"values": batched(), "length": batched()}
    return mixed(ModelSpec("padded", series(process=padded, fields=fields), frames()))


@planted("L5", r"frames\[\d\] alone and in this request: \['frames'\]: values differ")
def normalised_over_the_batch() -> Subject:
    """Values are divided by the largest of the request."""

    def normalised(items: Any, scope: Any) -> dict[str, Any]:
        values = torch.stack(list(items))
        return {"frames": values / values.abs().max().clamp(min=1)}

    return mixed(ModelSpec("normalised", series(), frames(process=normalised)))


@planted("L5", r"frames\[\d\] alone and in this request: \['position'\]: values differ")
def field_of_the_index() -> Subject:
    """A field holds the number of the item in its request, which a cached item keeps."""
    fields = {"frames": batched(), "position": batched(value=item.index, dtype="int64")}

    def stacked(items: Any, scope: Any) -> dict[str, Any]:
        return {"frames": torch.stack(list(items))}

    return mixed(ModelSpec("numbered", series(), frames(process=stacked, fields=fields)))


# -- L6: the worst case ------------------------------------------------------------------------------------------------


@planted("L6", r"series has an item of \d rows, and at most 1 are stated")
def dummy_that_is_not_the_worst_case() -> Subject:
    """The shortest series gets the most rows, and the dummy item is the longest."""
    layout = embed(tok["<row>"]) * (5 - item.length)
    return mixed(ModelSpec("inverse", series(layout=layout), frames()))


def _stated(more: int) -> type:
    class Stating(Info):
        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Any:
            found = super().get_mm_max_tokens_per_item(seq_len, mm_counts)
            return {name: count + more for name, count in found.items()}

    return Stating


@planted("L6", r"(3 rows are stated for series, and the dummy item has 4|1 rows .* for frames, and .* has 2)")
def stated_maximum_too_small() -> Subject:
    """The scheduler is told one row less than the largest item has."""
    return mixed(info=_stated(-1))


@planted("L6", r"(5 rows are stated for series, and the dummy item has 4|3 rows .* for frames, and .* has 2)")
def stated_maximum_too_large() -> Subject:
    """The scheduler is told one row more, which no item has."""
    return mixed(info=_stated(1))


# -- L7: identity ------------------------------------------------------------------------------------------------------


@planted("L7", r"kwargs \{.*\} have the same hash")
def hash_without_kwargs() -> Subject:
    """The hash of an item does not see the kwargs under which it is processed."""
    return mixed(processor=_without_kwargs())


@planted("L7", r"TensorSample\(seed=1, .*\) has the same hash")
def hash_of_the_shape() -> Subject:
    """The hash of an item sees its shape only."""

    class ByShape(Processor):
        def _get_mm_hashes(self, inputs: Any) -> Any:
            kwargs = sorted(inputs.hf_processor_mm_kwargs.items())
            items = inputs.mm_data_items.items()
            return {name: [f"{name} {tuple(v.shape)} {kwargs}" for v in found.get_all()] for name, found in items}

    return mixed(processor=ByShape)


class _Kept(Parser):
    """Keeps what a caller sends as it is."""

    def _parse(self, modality: Any, data: Any) -> Any:
        if self._embeddings(modality, data) is not None:
            return super()._parse(modality, data)
        values = [v if isinstance(v, torch.Tensor) else torch.as_tensor(np.asarray(v)) for v in data]
        return TensorItems(values, modality.name)


def _parsing(parser: type) -> type:
    class Parsing(Info):
        def get_data_parser(self) -> Any:
            return parser(self.plan, self._get_expected_hidden_size())

    return Parsing


@planted("L7", r"the same content as (ndarray|list) has another hash")
def hash_of_the_container() -> Subject:
    """Items are hashed as they come: a list and a float64 array are not the float32 tensor of their values."""
    return mixed(info=_parsing(_Kept))


# -- L8: fields --------------------------------------------------------------------------------------------------------


@planted("L8", r"series\[0\] has \['length', 'values'\], declared are \['length', 'values', 'version'\]")
def field_without_config() -> Subject:
    """A field that the process function returns has no config, and vLLM drops it."""

    class Dropping(Processor):
        def _get_mm_fields_config(self, *rest: Any, **named: Any) -> Any:
            return {k: v for k, v in super()._get_mm_fields_config(*rest, **named).items() if k != "version"}

    return mixed(processor=Dropping)


def _splitting(change: Callable[[torch.Tensor], torch.Tensor], dim: int = 0) -> type:
    class Splitting(Processor):
        def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
            config = super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)
            if "length" not in hf_inputs:
                return config
            sizes = change(torch.stack(list(hf_inputs["length"])))
            return {**config, "values": MultiModalFieldConfig.flat_from_sizes("series", sizes, dim=dim)}

    return Splitting


@planted("L8", r"split by the spec and by vLLM: series\[0\]\['values'\]: .*\(\d, 2\) and .*\(\d, 2\)")
def flat_sizes_in_the_wrong_order() -> Subject:
    """A flat field is split by the sizes of the items in reverse."""
    return mixed(processor=_splitting(lambda sizes: sizes.flip(0)))


@planted("L8", r"split by the spec and by vLLM: series\[0\]\['values'\]: .*|the field 'values' before and after")
def split_along_another_dimension() -> Subject:
    """A flat field is split along its second dimension."""
    return mixed(processor=_splitting(lambda sizes: sizes, dim=1))


# -- L9: refusal -------------------------------------------------------------------------------------------------------


@planted("L9", r"one item of frames too many: accepted")
def surplus_items_accepted() -> Subject:
    """Items without a placeholder are dropped silently."""

    class Dropping(Processor):
        def apply(self, inputs: Any, timing_ctx: Any) -> Any:
            if (found := inputs.mm_data_items.get("frames")) is not None and not isinstance(found, EmbedItems):
                found.data = found.data[: inputs.prompt.count(ID["<frame>"])]
            return super().apply(inputs, timing_ctx)

    return mixed(processor=Dropping)


@planted("L9", r"one item of frames too few: accepted")
def missing_items_accepted() -> Subject:
    """Placeholders without an item are dropped silently."""

    class Dropping(Processor):
        def apply(self, inputs: Any, timing_ctx: Any) -> Any:
            while inputs.prompt.count(ID["<frame>"]) > len(inputs.mm_data_items.get("frames", ())) > 0:
                inputs.prompt.remove(ID["<frame>"])
            return super().apply(inputs, timing_ctx)

    return mixed(processor=Dropping)


class _Lenient(Parser):
    """Makes something of items that are no good."""

    def _parse(self, modality: Any, data: Any) -> Any:
        try:
            return super()._parse(modality, data)
        except InputError:
            return super()._parse(modality, [self.mended(v) for v in data])

    def mended(self, value: Any) -> Any:
        return value


@planted("L9", r"NaN in an item of (series|frames): accepted")
def nan_accepted() -> Subject:
    """NaN becomes zero."""

    class Mending(_Lenient):
        def mended(self, value: Any) -> Any:
            return value.nan_to_num() if isinstance(value, torch.Tensor) else value

    return mixed(info=_parsing(Mending))


@planted("L9", r"a wrong shape in (series|frames): accepted")
def wrong_shape_accepted() -> Subject:
    """Of a batch in place of an item, the first is taken."""

    class First(_Lenient):
        def mended(self, value: Any) -> Any:
            return value[0, 0] if isinstance(value, torch.Tensor) and value.ndim == 4 else value

    return mixed(info=_parsing(First))


@planted("L9", r"None as an item of (series|frames): accepted")
def none_accepted() -> Subject:
    """None becomes zeros."""

    class Zeros(Parser):
        def _parse(self, modality: Any, data: Any) -> Any:
            return super()._parse(modality, [modality.largest()[0] if v is None else v for v in data])

    return mixed(info=_parsing(Zeros))


@planted("L9", r"an unknown modality: accepted")
def unknown_modality_ignored() -> Subject:
    """Data of a modality that the model lacks is dropped silently."""

    class Ignoring(Info):
        def parse_mm_data(self, mm_data: Any, **options: Any) -> Any:
            return super().parse_mm_data({k: v for k, v in mm_data.items() if k in ("series", "frames")}, **options)

    return mixed(info=Ignoring)


@planted("L9", r": the message names no modality: request: expected well-formed items")
def message_without_modality() -> Subject:
    """The message of a refusal does not say which modality it is about."""

    class Vague(Info):
        def parse_mm_data(self, mm_data: Any, **options: Any) -> Any:
            try:
                return super().parse_mm_data(mm_data, **options)
            except InputError:
                raise InputError("request", "well-formed items", "others") from None

    return mixed(info=Vague)


@planted("L9", r"as an item of (series|frames): refused with (TypeError|RuntimeError|ValueError|AttributeError): ")
def refused_by_a_crash() -> Subject:
    """Malformed items are not looked at, and torch's own error reaches the caller."""
    return mixed(info=_parsing(_Kept))


# -- L10: expanded prompts ---------------------------------------------------------------------------------------------


@planted("L10", r"\d+ ids became \d+")
def double_expansion() -> Subject:
    """The layout begins with its own target, and an expanded one is expanded again."""
    spec = ModelSpec("double", frames(layout=tok["<frame>"] + embed(tok["<pad>"]) * 2))

    class Double(spec.classes.processor):  # type: ignore[misc, name-defined]
        _apply_prompt_updates = BaseMultiModalProcessor._apply_prompt_updates

    return mixed(spec, processor=Double)


@planted("L10", r"refused with InputError: mixed\.frames")
def expanded_prompt_refused() -> Subject:
    """Prompts that hold placeholder ids are refused, as those are that vLLM hands back after preprocessing."""

    class Strict(Processor):
        def _apply_prompt_updates(self, token_ids: Any, mm_prompt_updates: Any) -> Any:
            if ID["<pad>"] in token_ids:
                raise InputError("mixed.frames", "<frame>", "<pad>")
            return super()._apply_prompt_updates(token_ids, mm_prompt_updates)

    return mixed(processor=Strict)


# -- L11: embeddings ---------------------------------------------------------------------------------------------------


@planted("L11", r"the raw item and its embeddings: ranges\['frames'\]")
def embeddings_with_another_range() -> Subject:
    """The layout of embeddings has a token more than that of raw items."""
    embeds = embed(tok["<pad>"]) * item.length + tok["<close>"]
    return mixed(ModelSpec("framed", series(), frames(embeds=embeds)))


@planted("L11", r"embeddings of frames pass the parser, then KeyError: 'frames'")
def embeddings_that_raise() -> Subject:
    """The prompt update reads a field that embeddings do not have."""

    class Reading(Processor):
        def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
            for fields in out_mm_kwargs.get("frames", ()):
                assert len(fields["frames"].data)
            return super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)

    return mixed(processor=Reading)


@planted("L11", r"the spec takes embeddings of frames, and the parser refuses them: mixed\.frames")
def embeddings_refused() -> Subject:
    """The spec takes embeddings and the parser does not."""

    class Raw(Parser):
        def _embeddings(self, modality: Any, data: Any) -> Any:
            return None

    return mixed(info=_parsing(Raw))


# -- L12: processes ----------------------------------------------------------------------------------------------------

_CALIBRATION: dict[str, int] = {}


def _calibrated(items: Any, scope: Any) -> dict[str, Any]:
    return {"frames": torch.stack(list(items)) + _CALIBRATION.get("offset", 0)}


CALIBRATED = ModelSpec("values", series(), frames(process=_calibrated))


@planted("L12", r"the classes cannot be pickled: ")
def classes_that_cannot_be_pickled() -> Subject:
    """A subclass inside of a function, which no other process can import."""

    class Local(Processor):
        pass

    return mixed(processor=Local)


@planted("L12", r"in this process and in a spawned one: fields\['frames'\]\[0\]\['frames'\]: values differ")
def fields_of_the_process() -> Subject:
    """The processed values depend on a variable that only this process has set."""
    _CALIBRATION["offset"] = 1
    return mixed(CALIBRATED)


# -- L13: safety -------------------------------------------------------------------------------------------------------


@planted("L13", r"placeholder ids \[4, 5\] can be sampled")
def placeholders_sampled() -> Subject:
    """The logits of placeholder ids are left as they are."""

    class Sampling(ByHand):
        def compute_logits(self, hidden_states: torch.Tensor) -> Any:
            return self.body.compute_logits(hidden_states)

    return with_model(Sampling)


@planted("L13", r"placeholder ids \[5\] can be sampled")
def placeholders_of_one_modality_sampled() -> Subject:
    """The placeholder of the second modality is forgotten in the mask."""

    class Sampling(ByHand):
        def compute_logits(self, hidden_states: torch.Tensor) -> Any:
            return self.body.compute_logits(hidden_states).index_fill(-1, torch.tensor(ID["<pad>"]), -torch.inf)

    return with_model(Sampling)


@planted("L13", r"ids \[4, 5, -1, 32, 2147483647\] in a prompt: IndexError")
def crash_outside_the_vocabulary() -> Subject:
    """Ids go to the embedding table unchecked."""

    class Unchecked(ByHand):
        def embed_input_ids(self, input_ids: Any, *rest: Any, **named: Any) -> Any:
            return self.body.embed_input_ids(input_ids)

    return with_model(Unchecked)


@planted("L13", r"ids \[4, 5, -1, 32, 2147483647\] are embedded as NaN")
def bare_placeholders_as_nan() -> Subject:
    """Placeholders wait for their rows as NaN, also those without an item."""

    class Waiting(ByHand):
        def embed_input_ids(self, input_ids: Any, *rest: Any, **named: Any) -> Any:
            made = super().embed_input_ids(input_ids)
            return made.masked_fill((input_ids == ID["<pad>"])[:, None], torch.nan)

    return with_model(Waiting)


# -- what catches what -------------------------------------------------------------------------------------------------


def caught(bug: Bug, law: str, examples: int, *, shrink: bool = True) -> str | None:
    """What a law says of a bug; None if it says nothing. The same every time."""
    with profile(derandomize=True, phases=[Phase.generate, *[Phase.shrink] * shrink]):
        try:
            check_law(law, bug.subject(), examples=examples)
        except Violation as violation:
            return str(violation)
        except NotApplicable:
            pass
    return None


def others(bug: Bug, examples: int) -> list[str]:
    """The other laws that catch a bug, of those that need no model and no process. These are not asked about the bugs
    of models, whose processors are correct."""
    if LAWS[bug.law].needs_model:
        return []
    subject, found = bug.subject(), []
    with profile(derandomize=True, phases=[Phase.generate]):
        for number, law in LAWS.items():
            if number not in (bug.law, "L12") and not law.needs_model:
                try:
                    check_law(law, subject, examples=examples)
                except Violation:
                    found.append(number)
                except NotApplicable:
                    pass
    return found


def brief(message: str) -> str:
    """What a violation says, without the law and the request."""
    text = re.sub(r"^L\d+ [\w =]+: ", "", message).split("\n")[0]
    return text if len(text) <= 120 else f"{text[:117]}..."


HEADING = """\
# Planted bugs

What people get wrong in a processor, a spec or a model, each with the law that must catch it, what that law says, and
the other laws that see it too. [test_planted_bugs.py](../tests/path/test_planted_bugs.py) holds every one of them
to its law and its message; `python -m tests.path.planted` writes this page.

| bug | what is wrong | law | what it says | also caught by |
| --- | --- | --- | --- | --- |
"""


def page(examples: int = 60) -> str:
    """All bugs, in markdown."""
    lines = []
    for bug in tqdm(BUGS):
        said = brief(caught(bug, bug.law, examples) or "nothing").replace("|", "\\|")
        also = ", ".join(others(bug, examples))
        lines.append(f"| {bug.name.replace('_', ' ')} | {bug.sentence} | {bug.law} | `{said}` | {also} |\n")
    return HEADING + "".join(lines)


if __name__ == "__main__":
    from tests.path import planted as module  # the classes must be importable from other processes

    (Path(__file__).parents[2] / "docs/planted-bugs.md").write_text(module.page())
