"""What an ejected file has beside the classes of its model. Never imported by it: its source is copied, statement by
statement, as far as the model uses it.

A comment ``# only FEATURE`` (or ``# only A or B``) stands above a statement that goes into files of models with that
feature alone; `mmkit.eject.source` knows the features.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, TypeAlias

from transformers.feature_extraction_utils import BatchFeature
from typing_extensions import override
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    EncDecMultiModalProcessor,
    ProcessorInputs,
    PromptInsertion,
    PromptReplacement,
    PromptUpdateDetails,
)
from vllm.multimodal.processing.processor import PlaceholderFeaturesInfo
from vllm.renderers import TokenizeParams

from ..errors import InputError, MmkitError, SpecError
from ..expr import plain
from ..fields import Field
from ..items import SCOPES, Audio, Image, Video, embeddings, magnitude
from ..layout import Laid, surrounded
from ..plan import Processed, vocab_size
from ..updates import NotFound, Resolved, Target, may_be_split, place, place_in_text, refuse_surplus
from ..vllm_api.common import EmbedItems, LazyProcessor, TensorItems, item_slices, target_of
from ..vllm_api.hashes import ByVllm, Hashes, TenantNames, check_name
from ..vocabulary import Vocabulary


@dataclass(frozen=True)
class Scope:
    """What is known where a value is computed.

    Attributes:
        cfg: the Hugging Face config.
        proc: the Hugging Face processor, loaded when an attribute of it is used.
        tok: the vocabulary: ``tok[token]`` is an id, ``tok(text)`` a list of ids; None without a tokenizer.
        kwargs: the request's `mm_processor_kwargs`, merged with those of the engine.
        item: facts of the current item.
        out: its processed fields.
        prompt: the caller's token ids.
        made: what `mm_processor_kwargs` alone decide, kept.
    """

    cfg: Any
    proc: Any
    tok: Any
    kwargs: Mapping[str, Any]
    item: Any = None
    out: Any = None
    prompt: Any = None
    made: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


def evaluate(value: Any, scope: Scope) -> Any:
    """A value that may be a function of a scope."""
    return value(scope) if callable(value) else value


def option(scope: Scope, name: str, default: Callable[[], Any]) -> Any:
    """An entry of the request's `mm_processor_kwargs`, or a default."""
    return scope.kwargs[name] if name in scope.kwargs else default()


def attribute(holder: Any, name: str) -> Any:
    """An attribute, or the entry of a mapping."""
    return holder[name] if isinstance(holder, Mapping) else getattr(holder, name)


def ceil_div(a: Any, b: Any) -> Any:
    """``a / b``, rounded up to an integer."""
    return -(-a // b)


def whole(value: Any, what: str) -> int:
    """A whole number >= 0, also from a tensor of one element."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, Integral)) or value < 0:
        remedy = "Use // or ceil_div, which give whole numbers." if isinstance(value, float) else ""
        raise SpecError(what, "a whole number >= 0", repr(value), remedy)
    return int(value)


Positions: TypeAlias = list[tuple[int, bool]]
"""Token ids, each with whether its position receives an encoder row."""

MOST_POSITIONS = 1 << 22


def embed(token: Any) -> Positions:
    """One position that receives an encoder row."""
    return [(whole(token, "a token id"), True)]


def literal(tokens: Any) -> Positions:
    """An id, or several, that receive none."""
    tokens = plain(tokens)
    ids = tokens if isinstance(tokens, Sequence) else [tokens]
    return [(whole(token, "a token id"), False) for token in ids]


def repeat(positions: Positions, count: Any) -> Positions:
    """The same positions, some times in a row."""
    times = whole(count, "a repetition count")
    if times * len(positions) > MOST_POSITIONS:
        raise SpecError("a placeholder", f"at most {MOST_POSITIONS} ids", str(times * len(positions)))
    return positions * times


def each(
    over: Any, body: Callable[[Any], Positions], sep: Callable[[Any], Positions] | None = None, last: Any = ()
) -> Positions:
    """The positions of each element of a sequence, or of each number below `over`.

    Args:
        over: a sequence, or a number.
        body: the positions of an element.
        sep: stands before each element but the first.
        last: stands after the last element, if there is one.
    """
    over = plain(over)
    elements = over if isinstance(over, (tuple, range)) else range(whole(over, "a number of elements"))
    made: Positions = []
    for index, element in enumerate(elements):
        if sep is not None and index:
            made += sep(element)
        made += body(element)
        if max(index, len(made)) > MOST_POSITIONS:
            raise SpecError("a placeholder", f"at most {MOST_POSITIONS} ids", "more")
    return [*made, *last] if len(elements) else []


def embedded(positions: Positions) -> list[int]:
    """The ids at the positions that receive encoder rows."""
    return [token for token, embeds in positions if embeds]


@contextmanager
def computing(where: str) -> Iterator[None]:
    """Say where a value could not be computed."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        text = str(error) if isinstance(error, SpecError) else f"{type(error).__name__}: {error}"
        raise SpecError(f"{where}: {text}") from error


class Modality:
    """One kind of item: what callers may send, what becomes of it in the prompt, and its tensors.

    Attributes:
        name: the key in ``multi_modal_data``.
        fields: the processed tensors, by the name under which the model receives them.
        reads_out: placeholders depend on processed fields.
        by_hf: a Hugging Face processor makes the fields.
    """

    name: ClassVar[str]
    fields: ClassVar[Mapping[str, Field]]
    reads_out: ClassVar[bool] = False
    by_hf: ClassVar[bool] = False
    # only index
    by_index: ClassVar[bool] = False
    bounded: ClassVar[bool] = True
    # only embeds
    takes_embeds: ClassVar[bool] = False
    # only hf
    inputs: ClassVar[Mapping[str, str]] = {}
    # only hf
    outputs: ClassVar[Mapping[str, str]] = {}
    # only hf
    processor: ClassVar[Callable[[Scope], Any] | None] = None
    # only unpad
    unpad: ClassVar[Mapping[str, Callable[[Scope], tuple[Any, ...]]]] = {}

    def __init__(self, model: str, scope: Scope) -> None:
        self.where, self.scope = f"{model}.{self.name}", scope
        with computing(f"{self.where}, item"):
            self.item = self.item_type(scope)
        with computing(f"{self.where}, limit"):
            self.limit = self.most(scope)

    # -- what a model says of its items

    def item_type(self, s: Scope) -> Any:
        """What a caller may send."""
        raise NotImplementedError

    def most(self, s: Scope) -> int | None:
        """The most items in one request."""
        return None

    def positions(self, s: Scope) -> Positions:
        """The placeholder of an item."""
        raise NotImplementedError

    def updates(self, s: Scope) -> list[tuple[str, Positions]]:
        """How it gets into the prompt, in order of preference: ``replace`` with what it replaces, ``after`` with the
        prefix that it follows, ``start``, ``end``, or ``in_place``, where callers write it.
        """
        raise NotImplementedError

    def known_ids(self, s: Scope) -> list[int]:
        """The ids that receive encoder rows whatever the item."""
        return []

    # only own
    def process(self, values: Sequence[Any], s: Scope) -> Mapping[str, Any]:
        """The fields of some items."""
        raise NotImplementedError

    # only when
    def present(self, s: Scope) -> bool:
        """Whether the model has this modality at all."""
        return True

    # only cache
    def cacheable(self, s: Scope) -> bool:
        """Whether items of a request of ``s.item.count`` may be kept in vLLM's processor cache."""
        return True

    # only embeds
    def embeds_positions(self, s: Scope) -> Positions:
        """The placeholder of precomputed embeddings of ``s.item.length`` rows."""
        return self.positions(s)

    # only text
    def text(self, s: Scope) -> Any:
        """What stands for one item in the text that the Hugging Face processor wants."""
        return None

    # only fixed
    def fixed_targets(self, s: Scope) -> list[Positions]:
        """What stands for any item alone in a prompt."""
        return []

    # only numbered
    def numbered(self, s: Scope) -> list[Positions]:
        """What stands for the item ``s.item.index`` alone in a prompt."""
        return []

    # -- items

    def parse(self, data: object) -> list[Any]:
        """A caller's data as canonical items. None stands for an item whose content a `multi_modal_uuids` entry names.

        Raises:
            InputError: None in place of the data, or a malformed item. An empty list is no item, as in vLLM.
        """
        if data is None:
            expected = f"{self.item.expected} or a list of them"
            raise InputError(self.where, expected, "None", "Send the item, or leave the modality out.")
        values = self.item.split(data, self.where)
        return [None if v is None else self.item.canonical(v, f"{self.where}[{i}]") for i, v in enumerate(values)]

    def about(self, s: Scope, value: Any, index: int, out: Mapping[str, Any] | None = None, count: int = 1) -> Scope:
        """What is known of one item of a request with `count` of them."""
        facts = value if isinstance(value, SimpleNamespace) else self.item.facts(value, index)
        facts.count = count
        return replace(s, item=facts, out=out)

    # only cache
    def may_cache(self, count: int) -> bool:
        """Whether items of a request with `count` of them may be kept in vLLM's processor cache."""
        with computing(f"{self.where}, cache"):
            return bool(self.cacheable(replace(self.scope, item=SimpleNamespace(count=count))))

    # -- fields

    def finish(self, raw: Mapping[str, Any], values: Sequence[Any], s: Scope, count: int) -> Processed:
        """Split processed tensors into items and check them against the declared fields."""
        # only hf
        raw = {self.outputs.get(name, name): value for name, value in raw.items()}
        if missing := [name for name, f in self.fields.items() if f.value is None and raw.get(name) is None]:
            got = f"{sorted(raw)}, without {missing}"
            raise SpecError(f"{self.where}, process", f"the fields {sorted(self.fields)}", got)
        parts: list[dict[str, Any]] = [{} for _ in values]
        scopes = [self.about(s, value, i, parts[i], count) for i, value in enumerate(values)]
        extents: dict[str, list[int]] = {}
        # derived fields may depend on processed ones, and the sizes of flat fields on both
        for name, declared in sorted(self.fields.items(), key=lambda f: (f[1].kind == "flat", f[1].value is not None)):
            where = f"{self.where}, fields[{name!r}]"
            with computing(where):
                if declared.value is not None and declared.kind == "shared":
                    made = [declared.derive(s)] * len(values)  # type: ignore[arg-type]
                elif declared.value is not None:
                    made = [declared.derive(scope) for scope in scopes]  # type: ignore[arg-type]
                elif declared.kind == "flat":
                    extents[name] = [whole(evaluate(declared.sizes, scope), "a size") for scope in scopes]
            if declared.value is None:
                made = declared.split(raw[name], extents.get(name), len(values), where)
            for parts_of_item, part in zip(parts, made, strict=True):
                parts_of_item[name] = part
        # only unpad
        for name, sizes in self.unpad.items():
            for parts_of_item, scope in zip(parts, scopes, strict=True):
                parts_of_item[name] = parts_of_item[name][tuple(slice(int(size)) for size in sizes(scope))]
        data = {}
        for name, declared in self.fields.items():
            own = [parts_of_item[name] for parts_of_item in parts]
            with computing(f"{self.where}, fields[{name!r}]"):
                for i, (part, scope) in enumerate(zip(own, scopes, strict=True)):
                    declared.check(part, scope, i)  # type: ignore[arg-type]
            data[name] = {"batched": own, "shared": own[0], "flat": raw.get(name)}[declared.kind]
        return Processed(data, extents, parts)

    def field_configs(self, processed: Processed) -> dict[str, MultiModalFieldConfig]:
        """How vLLM splits the fields."""
        configs: dict[str, MultiModalFieldConfig] = {}
        for key, declared in self.fields.items():
            options = {"keep_on_cpu": True} if declared.keep_on_cpu else {}
            if declared.kind == "batched":
                configs[key] = MultiModalFieldConfig.batched(self.name, **options)
            elif declared.kind == "shared":
                configs[key] = MultiModalFieldConfig.shared(self.name, len(processed.parts), **options)
            else:
                slices = item_slices(processed.sizes.get(key, []), declared.dim)
                configs[key] = MultiModalFieldConfig.flat(self.name, slices, dim=declared.dim, **options)
        # only embeds
        if self.takes_embeds:
            configs[f"{self.name}_embeds"] = MultiModalFieldConfig.batched(self.name)
        return configs

    # -- placeholders

    def ways(self, s: Scope, *, embeds: bool = False) -> list[Resolved]:
        """The alternatives of one item, in order of preference: target, ids, mask."""
        with computing(f"{self.where}, layout"):
            positions = self.positions(s)
            # only embeds
            if embeds:
                positions = self.embeds_positions(s)
            laid = Laid([token for token, _ in positions], bytes(flag for _, flag in positions))
            self.check_vocabulary(laid.ids)
            if not laid.num_embeds:
                raise SpecError(self.where, "at least one embed() position per item", f"{len(laid)} literal ids")
        with computing(f"{self.where}, update"):
            targets = [(kind, tuple(token for token, _ in target)) for kind, target in self.updates(s)]
            for kind, target in targets:
                self.check_vocabulary(target)
                if kind == "replace" and not target:
                    raise SpecError(self.where, "a target of at least one token", "none")
        return [Resolved(kind, target, laid) for kind, target in targets]

    def check_vocabulary(self, ids: Sequence[int]) -> None:
        """Refuse ids that the language model lacks."""
        if ids and max(ids) >= (size := vocab_size(self.scope.cfg)):
            raise SpecError(self.where, f"token ids below the vocabulary size {size}", str(max(ids)))

    def largest(
        self, process: Callable[[Any], Mapping[str, Any]] | None = None, sizes: Mapping[str, int] | None = None
    ) -> tuple[Any, int]:
        """The item with the most encoder rows, of at most some sizes, and how many they are."""
        candidates = (self.item.within(sizes, self.where) if sizes else self.item).candidates()
        rows = [self.laid(value, process).num_embeds for value in candidates]
        return candidates[rows.index(max(rows))], max(rows)

    def laid(self, value: Any, process: Callable[[Any], Mapping[str, Any]] | None = None) -> Laid:
        """The preferred placeholder of an item that is the only one."""
        out = (process or self.process_one)(value) if self.reads_out else None
        return self.ways(self.about(self.scope, value, 0, out))[0].laid

    def process_one(self, value: Any) -> Mapping[str, Any]:
        """The fields of an item that is the only one."""
        # only own
        if not self.by_hf:
            return self.finish(self.process([value], self.scope), [value], self.scope, 1).parts[0]
        raise SpecError(self.where, "a process that runs without a Hugging Face processor", "one that needs it")

    @property
    def waits_for_hf(self) -> bool:
        """Placeholders depend on the output of a Hugging Face processor."""
        return self.by_hf and self.reads_out

    def placeholder_ids(self) -> set[int]:
        """The ids that receive encoder rows, as far as they are known without an item."""
        with computing(f"{self.where}, layout"):
            found = set(self.known_ids(self.scope))
        for value in [] if self.waits_for_hf else self.item.extremes():
            found |= self.laid(value).embed_ids
        return found


class Parser(MultiModalDataParser):
    """Turns what callers send into canonical items."""

    def __init__(self, info: ProcessingInfo, hidden_size: int | None) -> None:
        options: dict[str, Any] = {}
        # only audio
        options["target_sr"] = next((m.item.rate for m in info.modalities.values() if isinstance(m.item, Audio)), None)
        # only video
        options["video_needs_metadata"] = any(
            m.item.metadata for m in info.modalities.values() if isinstance(m.item, Video)
        )
        super().__init__(**options)
        self.info, self.hidden_size = info, hidden_size

    @override
    def _get_subparsers(self) -> Mapping[str, Any]:
        return {name: lambda data, m=modality: self._parse(m, data) for name, modality in self.info.modalities.items()}

    @override
    def parse_mm_data(self, mm_data: Any) -> Any:
        self.info.check_names(mm_data)
        return super().parse_mm_data(mm_data)

    def _parse(self, modality: Modality, data: Any) -> Any:
        key = f"{modality.name}_embeds"
        # only embeds
        if modality.takes_embeds:
            rows = embeddings(data, modality.item, key, self.hidden_size, modality.where)
            if rows is not None:
                return EmbedItems(rows, modality.name)
        if isinstance(data, Mapping) and set(data) == {key}:
            raise InputError(modality.where, modality.item.expected, key, "Send the raw item.")
        items = modality.parse(data)
        # only image
        if isinstance(modality.item, Image):
            return self._parse_image_data(items)
        # only video
        if isinstance(modality.item, Video):
            return self._parse_video_data(items)
        # only audio
        if isinstance(modality.item, Audio):
            return self._parse_audio_data(items)
        # only tensor
        return TensorItems(items, modality.name)


@dataclass(frozen=True)
class CheckedTokenizeParams(TokenizeParams):
    """vLLM's tokenization parameters, which every prompt passes, with or without items: they refuse token ids that the
    model lacks and placeholders without data before the engine sees them."""

    info: ProcessingInfo | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, params: TokenizeParams, info: ProcessingInfo | None) -> CheckedTokenizeParams:
        """The same parameters, with the checks of an info."""
        return cls(**{f.name: getattr(params, f.name) for f in fields(TokenizeParams)}, info=info)

    @override
    def with_kwargs(self, **tokenization_kwargs: Any) -> CheckedTokenizeParams:
        return self.of(super().with_kwargs(**tokenization_kwargs), self.info)

    @override
    def apply_post_tokenization(self, tokenizer: Any, prompt: Any) -> Any:
        ids = prompt.get("prompt_token_ids")
        # a prompt with items is checked by the processor
        if ids is not None and self.info is not None and not prompt.get("multi_modal_data"):
            self.info.check_ids(ids)
            self.info.check_bare(ids)
            # only prompt
            if self.info.only_prompt:  # else this may be the decoder's
                prompt["prompt_token_ids"] = self.info.rewrite("prompt", ids)
        if self.info is not None and isinstance(prompt.get("multi_modal_uuids"), Mapping):
            prompt = {**prompt}  # the caller's own may be used again
            prompt["multi_modal_uuids"] = TenantNames(prompt, self.info.name)
        return super().apply_post_tokenization(tokenizer, prompt)


NUMBERED = 64
"""Numbered placeholders (``<|image_1|>``) that are known before there is an item."""


class ProcessingInfo(BaseProcessingInfo):
    """What vLLM asks about the modalities of a model."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[type[Modality], ...]]
    # only prompt
    prompt: ClassVar[Callable[[Scope], Positions] | None] = None
    # only prompt
    decoder_prompt: ClassVar[Callable[[Scope], Positions] | None] = None
    # only around
    prompt_around: ClassVar[Callable[[Scope], list[Positions]] | None] = None
    # only around
    decoder_prompt_around: ClassVar[Callable[[Scope], list[Positions]] | None] = None

    @cached_property
    def scope(self) -> Scope:
        """What is known before there is a request."""
        tokenizer = self.ctx.tokenizer
        vocabulary = None if tokenizer is None else Vocabulary(tokenizer)
        kwargs = self.ctx.get_merged_mm_kwargs({})
        return Scope(self.get_hf_config(), LazyProcessor(self.get_hf_processor), vocabulary, kwargs)

    @cached_property
    def _scopes(self) -> OrderedDict[str, Scope]:
        return OrderedDict()

    def configured(self, kwargs: Mapping[str, object]) -> Scope:
        """What is known for the `mm_processor_kwargs` of one request."""
        merged = self.ctx.get_merged_mm_kwargs(kwargs)
        # only hf
        if scopes := [name for name in SCOPES if name in merged]:
            remedy = "Send its entries beside the others."
            raise InputError(f"{self.name}.mm_processor_kwargs", "options without scopes", scopes[0], remedy)
        if merged == self.scope.kwargs:
            return self.scope
        processor = LazyProcessor(lambda: self.get_hf_processor(**kwargs))
        made = replace(self.scope, kwargs=merged, proc=processor, made={})
        try:
            key = json.dumps(merged, sort_keys=True)
        except TypeError:  # values that JSON lacks
            return made
        kept = self._scopes.setdefault(key, made)
        if len(self._scopes) > 32:
            self._scopes.popitem(last=False)
        return kept

    @cached_property
    def modalities(self) -> dict[str, Modality]:
        """The modalities of this checkpoint, by name."""
        made = [kind(self.name, self.scope) for kind in self.kinds if self._has(kind)]
        return {modality.name: modality for modality in made}

    def _has(self, kind: type[Modality]) -> bool:
        # only when
        with computing(f"{self.name}.{kind.name}, when"):
            return bool(kind.present(kind.__new__(kind), self.scope))
        return True

    @cached_property
    def owners(self) -> dict[int, list[str]]:
        """The placeholder ids that are known without an item, each with its modalities."""
        owners: dict[int, list[str]] = {}
        for name, modality in self.modalities.items():
            for token in modality.placeholder_ids():
                owners.setdefault(token, []).append(name)
        return owners

    @cached_property
    def surplus(self) -> dict[Target, str]:
        """The targets that can only stand for items, each with its modality: numbered ones, and those with a special
        token."""
        found: dict[Target, str] = {}
        # only fixed
        for name, modality in self.modalities.items():
            for target in modality.fixed_targets(self.scope):
                if self._is_special(ids := tuple(token for token, _ in target)):
                    found[ids] = name
        # only numbered
        for name, modality in self.modalities.items():
            with suppress(SpecError):  # the vocabulary ends somewhere
                for index in range(NUMBERED if modality.limit is None else min(modality.limit, NUMBERED)):
                    for target in modality.numbered(replace(self.scope, item=SimpleNamespace(index=index))):
                        found[tuple(token for token, _ in target)] = name
        return found

    # only fixed
    def _is_special(self, target: Target) -> bool:
        """Whether no text holds a target by chance."""
        if self.scope.tok is None:
            return len(target) == 1
        return not self.scope.tok.special.isdisjoint(target)

    # -- prompts

    def check_ids(self, prompt: Sequence[Any]) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            InputError: an id that is no whole number, or lies outside the vocabulary.
        """
        if not prompt:
            return
        if set(map(type, prompt)) != {int}:
            position = next(i for i, token in enumerate(prompt) if type(token) is not int)
            odd, where = prompt[position], f"{self.name}.prompt[{position}]"
            raise InputError(where, "a token id", f"{type(odd).__name__} {odd!r}", "Send integers.")
        size = vocab_size(self.scope.cfg)
        if min(prompt) < 0 or max(prompt) >= size:
            position = next(i for i, token in enumerate(prompt) if not 0 <= token < size)
            where, expected = f"{self.name}.prompt[{position}]", f"a token id from 0 to {size - 1}"
            raise InputError(where, expected, str(prompt[position]), "Check the tokenizer.")

    def check_names(self, data: Iterable[str]) -> None:
        """Refuse data of modalities that the model does not have.

        Raises:
            InputError: names the first of them.
        """
        if unknown := [name for name in data if name not in self.modalities]:
            expected, remedy = f"modalities among {sorted(self.modalities)}", ""
            base = unknown[0].removesuffix("_embeds")
            if base in self.modalities:
                remedy = f"Send the raw items of {base}: the spec takes no embeddings of them."
                # only embeds
                if self.modalities[base].takes_embeds:
                    remedy = f'Send embeddings as {{"{base}": {{"{base}_embeds": ...}}}}.'
            raise InputError(f"{self.name}.multi_modal_data", expected, repr(unknown[0]), remedy)

    def check_bare(self, prompt: Sequence[int], present: Collection[str] = ()) -> None:
        """Refuse placeholder ids of modalities that have no items in the request.

        Raises:
            InputError: names the modality and how many placeholder ids there are.
        """
        bare = {token for token, names in self.owners.items() if set(present).isdisjoint(names)}
        if bare and not bare.isdisjoint(prompt):
            token = min(bare.intersection(prompt))
            name = self.owners[token][0]
            got = f"{list(prompt).count(token)} placeholder id(s) {token} and no item"
            remedy = f'Send multi_modal_data={{"{name}": [...]}}, or leave the placeholders out.'
            raise InputError(self.modalities[name].where, "one item per placeholder", got, remedy)
        if not present:
            refuse_surplus(prompt, self.surplus, self.name)

    # only prompt
    @property
    def only_prompt(self) -> bool:
        """Whether there is no other prompt, for a decoder."""
        # only around
        if self.decoder_prompt_around is not None:
            return False
        return self.decoder_prompt is None

    # only prompt
    def rewrite(self, part: Literal["prompt", "decoder_prompt"], prompt: list[int]) -> list[int]:
        """What becomes of a caller's prompt, or of the decoder's.

        Raises:
            InputError: the prompt cannot be rewritten.
        """
        declared = getattr(self, part)
        # only around
        declared = declared or getattr(self, f"{part}_around")
        if declared is None:
            return prompt
        where = f"{self.name}.{part}"
        try:
            laid = declared(replace(self.scope, prompt=prompt))
        except MmkitError:
            raise
        except Exception as error:
            expected, got = "a prompt that the spec can rewrite", f"{type(error).__name__}: {error}"
            raise InputError(where, expected, got) from error
        # only around
        if getattr(self, part) is None:
            laid = [(token, False) for token in surrounded(prompt, *[[i for i, _ in side] for side in laid])]
        ids = [token for token, _ in laid]
        if ids and max(ids) >= (size := vocab_size(self.scope.cfg)):
            raise SpecError(where, f"token ids below the vocabulary size {size}", str(max(ids)))
        return ids

    # -- what vLLM asks

    @override
    def get_default_tok_params(self) -> TokenizeParams:
        return CheckedTokenizeParams.of(super().get_default_tok_params(), self)

    @override
    def get_data_parser(self) -> Parser:
        config = self.ctx.model_config
        embeds = config.get_multimodal_config().enable_mm_embeds
        return Parser(self, int(config.get_inputs_embeds_size()) if embeds else None)

    @override
    def validate_num_items(self, modality: str, num_items: int) -> None:
        limit = self.allowed_mm_limits[modality]
        if num_items > limit:
            remedy = f"At most {limit} {modality}(s) may be provided in one prompt."
            raise InputError(self.modalities[modality].where, "fewer items", str(num_items), remedy)

    @override
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {name: modality.limit for name, modality in self.modalities.items()}

    @override
    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int] | None:
        wanted = [modality for name, modality in self.modalities.items() if mm_counts.get(name)]
        if any(modality.waits_for_hf for modality in wanted):
            return None  # vLLM then processes the dummy inputs and counts
        return {modality.name: modality.largest()[1] for modality in wanted}


class DummyInputs(BaseDummyInputsBuilder[ProcessingInfo]):
    """The worst-case request of a model."""

    processor: Processor

    @override
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""  # dummy prompts are built as token ids

    @override
    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None) -> Any:
        sizes = {name: dummy_sizes(options) for name, options in (mm_options or {}).items()}
        counts = {name: count for name, count in mm_counts.items() if count}
        return {name: [self.processor.largest(name, sizes.get(name))] * count for name, count in counts.items()}


def dummy_sizes(options: Any) -> dict[str, int]:
    """The sizes that vLLM's `limit_mm_per_prompt` states for the dummy items of one modality."""
    return {name: size for name, size in vars(options).items() if name != "count" and size is not None}


def total(items: Any) -> int:
    """Number of items of the modality in the request: of those that are not cached, more than they are."""
    return int(getattr(items, "total", len(items)))


class Content(PromptUpdateDetails):
    """One alternative of one item: its ids, which of them receive encoder rows, and what they take the place of."""

    def __init__(self, way: Resolved, number: int, modality: Modality, scope: Scope | None, embeds: bool) -> None:
        mask = way.laid.is_embed
        super().__init__(full=way.laid.ids, is_embed=None if mask is None else lambda *_: mask)
        self.way, self.number = way, number
        self.modality, self.scope, self.embeds = modality, scope, embeds

    # only index
    def moved(self, index: int) -> Content:
        """The same alternative of the same item at another position among the request's items."""
        if self.scope is None or self.scope.item.index == index:
            return self
        scope = replace(self.scope, item=SimpleNamespace(**{**vars(self.scope.item), "index": index}))
        return contents(self.modality, scope, self.embeds)[self.number]


def contents(modality: Modality, scope: Scope, embeds: bool) -> list[Content]:
    """The alternatives of one item."""
    kept = None
    # only index
    if modality.by_index:
        kept = scope
    ways = modality.ways(scope, embeds=embeds)
    return [Content(way, number, modality, kept, embeds) for number, way in enumerate(ways)]


@dataclass
class HashedInputs(ProcessorInputs):
    """A request whose hashes the processor sees."""

    processor: Processor = field(kw_only=True, repr=False, compare=False)

    @override
    def get_mm_hashes(self, *args: Any, **kwargs: Any) -> Any:
        def by_vllm(forms: Any) -> Any:
            formed = replace(self, mm_data_items=forms, mm_uuid_items=None)  # type: ignore[call-arg]
            return ProcessorInputs.get_mm_hashes(formed, *args, **kwargs)

        options = bool(self.hf_processor_mm_kwargs or self.media_io_kwargs)
        return self.processor.hashed(self.mm_data_items, self.mm_uuid_items or {}, by_vllm, options=options)


PROCESSED = "processed_items"
"""Key in the BatchFeature under which the sizes of flat fields reach `_get_mm_fields_config`."""


class TooLarge(Exception):
    """The items of a request do not fit into the cache together."""


class Processor(BaseMultiModalProcessor[ProcessingInfo]):
    """Turns items into fields and placeholders."""

    requires_tokenizer = False

    def __init__(self, info: ProcessingInfo, dummy_inputs: DummyInputs, **options: Any) -> None:
        super().__init__(info, dummy_inputs, **options)
        dummy_inputs.processor = self
        self._hashes = Hashes(info.ctx.get_mm_config().mm_hasher_algorithm)
        self._largest: dict[Any, tuple[Any, int]] = {}
        assert info.owners is not None  # what cannot work with this checkpoint is found now

    # -- dummy inputs

    def largest(self, name: str, sizes: Mapping[str, int] | None = None) -> Any:
        """The item of a modality with the most encoder rows, of at most some sizes."""
        return self._most(name, sizes)[0]

    def _most(self, name: str, sizes: Mapping[str, int] | None = None) -> tuple[Any, int]:
        def process(value: Any) -> Mapping[str, Any]:
            return self._process(self.data_parser.parse_mm_data({name: [value]}), {})[name].parts[0]

        key = name, *(sizes or {}).items()
        if key not in self._largest:
            self._largest[key] = self.info.modalities[name].largest(process, sizes)
        return self._largest[key]

    @override
    def get_dummy_inputs(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> ProcessorInputs:
        mm_items = self.data_parser.parse_mm_data(self.dummy_inputs.get_dummy_mm_data(seq_len, mm_counts, mm_options))
        prompt: list[int] = []
        for name, processed in self._process(mm_items, {}).items():
            modality, values = self.info.modalities[name], mm_items[name].get_all()
            for index, (value, out) in enumerate(zip(values, processed.parts, strict=True)):
                way = modality.ways(modality.about(self.info.scope, value, index, out))[0]
                prompt += way.spelled
                if way.kind == "after" and not index:
                    prompt = [*way.target, *prompt]
        return ProcessorInputs(prompt=prompt, mm_data_items=mm_items)

    # -- one request

    @override
    def apply(self, inputs: ProcessorInputs, timing_ctx: Any) -> Any:
        self.info.check_ids(inputs.prompt)
        self._check_uuids(inputs.mm_data_items, inputs.mm_uuid_items or {})
        try:
            outcome = super().apply(inputs, timing_ctx)
        except Exception:
            # vLLM may have cached the items, but the engine, which shares the cache, will never see them
            for hashes in getattr(inputs.mm_data_items, "hashes", {}).values() if inputs.cache is not None else ():
                for item_hash in hashes:
                    inputs.cache.invalidate(item_hash)
            raise
        self._hashes.keep(getattr(inputs.mm_data_items, "names", {}))
        return outcome

    def hashed(
        self, mm_items: Any, uuids: Mapping[str, Any], by_vllm: ByVllm, *, options: bool
    ) -> dict[str, list[str]]:
        """The hashes of the items of a request, kept for one that fails."""
        hashes, mm_items.names = self._hashes.of(mm_items, uuids, by_vllm, options=options)
        # only cache
        hashes = {  # the engine caches encoder outputs by hash: what depends on the number of items is not the same
            name: found
            if self.info.modalities[name].may_cache(len(found))
            else [f"{item_hash}-of-{len(found)}" for item_hash in found]
            for name, found in hashes.items()
        }
        mm_items.hashes = hashes
        return hashes

    @override
    def _cached_apply_hf_processor(self, inputs: ProcessorInputs, timing_ctx: Any) -> Any:
        hashed = HashedInputs(**vars(inputs), processor=self)
        # only cache
        if not all(self.info.modalities[name].may_cache(len(items)) for name, items in inputs.mm_data_items.items()):
            return self._apply_hf_processor(hashed, timing_ctx)
        try:
            return super()._cached_apply_hf_processor(hashed, timing_ctx)
        except TooLarge:
            assert inputs.cache is not None
            inputs.cache.clear_cache()  # as the request does with the engine's half, which has the same size
        return self._apply_hf_processor(hashed, timing_ctx)

    @override
    def _merge_mm_kwargs(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._merge_mm_kwargs(*args, **kwargs)
        except AssertionError as error:  # of an item that another one of the same request has evicted
            raise TooLarge from error

    # only prompt
    @override
    def _postprocess_prompt(self, prompt: list[int]) -> list[int]:
        return self.info.rewrite("prompt", prompt)  # type: ignore[no-any-return]

    @override
    def _get_cache_missing_items(self, cache: Any, mm_data_items: Any, mm_hashes: Any) -> Any:
        # vLLM parses the missing items again; they are canonical already
        cached = {name: cache.is_cached(hashes) for name, hashes in mm_hashes.items()}
        missing = type(mm_data_items)()
        for name, flags in cached.items():
            if not all(flags):
                missing[name] = part = copy(mm_data_items[name])
                part.total = len(flags)
                indices = [i for i, flag in enumerate(flags) if not flag]
                part.data = [part.data[i] for i in indices]
                # only video
                if isinstance(getattr(part, "metadata", None), list):
                    part.metadata = [part.metadata[i] for i in indices]
        return cached, missing

    def _check_uuids(self, mm_items: Any, mm_uuids: Mapping[str, Any]) -> None:
        for name, items in mm_items.items():
            modality = self.info.modalities[name]
            uuids = mm_uuids.get(name) or [None] * len(items)
            for i, (value, uuid) in enumerate(zip(items.get_all(), uuids, strict=True)):
                if uuid is not None and not isinstance(uuid, str):
                    got = f"{type(uuid).__name__} {uuid!r}"
                    raise InputError(f"{modality.where}[{i}]", "a string in multi_modal_uuids", got)
                check_name(uuid, f"{modality.where}[{i}]")
                if value is None and uuid is None:
                    remedy = "Send the item, or the uuid of a cached one in multi_modal_uuids."
                    raise InputError(f"{modality.where}[{i}]", modality.item.expected, "None", remedy)

    # -- fields

    def _process(self, mm_items: Any, kwargs: Mapping[str, object]) -> dict[str, Processed]:
        s = self.info.configured(kwargs)
        done: dict[str, Processed] = {}
        # only hf
        calls: dict[Any, dict[str, Any]] = {}
        for name, items in mm_items.items():
            modality, values = self.info.modalities[name], items.get_all()
            for i, value in enumerate(values):
                if value is None:
                    got = "None, and no such item in the cache"
                    raise InputError(f"{modality.where}[{i}]", modality.item.expected, got, "Send the item itself.")
            if not values:
                continue
            # only embeds
            if isinstance(items, EmbedItems):
                key = f"{name}_embeds"
                done[name] = Processed({key: values}, {}, [{key: value} for value in values])
                continue
            # only hf
            if modality.by_hf:
                calls.setdefault(modality.processor, {})[name] = items
                continue
            # only own
            done[name] = modality.finish(modality.process(values, s), values, s, total(items))
        # only hf
        for group in calls.values():
            raw = self._call(s, group, kwargs)
            for name, items in group.items():
                done[name] = self.info.modalities[name].finish(raw, items.get_all(), s, total(items))
        return done

    # only hf
    def _call(self, s: Scope, group: Mapping[str, Any], kwargs: Mapping[str, object]) -> dict[str, Any]:
        """The outputs of a Hugging Face processor, or of one like it, for the modalities that share it."""
        modalities = {name: self.info.modalities[name] for name in group}
        make = next(iter(modalities.values())).processor
        if make is None:
            processor: Any = self.info.get_hf_processor(**kwargs)
        else:
            if make not in s.made:
                s.made[make] = make(s)
            processor = s.made[make]
        inputs: dict[str, Any] = {}
        for name, items in group.items():
            renames = {"audios": "audio", **modalities[name].inputs}
            inputs.update({renames.get(key, key): value for key, value in items.get_processor_data().items()})
        # only text
        texts = [(modality.text(s), len(group[name])) for name, modality in modalities.items()]
        # only text
        if any(text is not None for text, _ in texts):  # as many placeholders as items, however long they make it
            inputs = {"text": "".join(str(text) * count for text, count in texts if text is not None), **inputs}
            kwargs = {"truncation": False, **kwargs}
        try:
            return dict(self.info.ctx.call_hf_processor(processor, inputs, kwargs))
        except ValueError as error:  # vLLM's message shows all the data and not the reason
            where, cause = ", ".join(m.where for m in modalities.values()), error.__cause__ or error
            got = f"{type(cause).__name__}: {cause}".rstrip(".")
            raise InputError(where, "items that the Hugging Face processor takes", got) from error

    @override
    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> BatchFeature:
        processed = self._process(mm_items, hf_kwargs)
        data = {key: value for done in processed.values() for key, value in done.data.items()}
        return BatchFeature({**data, PROCESSED: processed})

    @override
    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]) -> Mapping[str, Any]:
        processed, none = hf_inputs.get(PROCESSED, {}), Processed({}, {}, [])
        configs: dict[str, Any] = {}
        for name, modality in self.info.modalities.items():
            configs.update(modality.field_configs(processed.get(name, none)))
        return configs

    # -- prompt updates

    @override
    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        s = self.info.configured(hf_processor_mm_kwargs)
        updates = []
        for name, items in mm_items.items():
            modality = self.info.modalities[name]
            found: list[list[Content]] = []
            for index, value in enumerate(items.get_all()):
                out = out_mm_kwargs[name][index].get_data()
                # only embeds
                if isinstance(items, EmbedItems):
                    facts = SimpleNamespace(index=index, length=len(value))
                    found.append(contents(modality, modality.about(s, facts, index, out, total(items)), True))
                    self._check_rows(modality, index, found[-1][0], len(value), hf_processor_mm_kwargs)
                    continue
                found.append(contents(modality, modality.about(s, value, index, out, total(items)), False))
                self._check_rows(modality, index, found[-1][0], None, hf_processor_mm_kwargs)
            for n in range(len(found[0]) if found else 0):
                ways = [alternatives[n] for alternatives in found]
                kind = PromptReplacement if ways[0].way.kind in ("replace", "in_place") else PromptInsertion
                updates.append(kind(name, lambda i, ways=ways: target_of(ways[i].way), ways.__getitem__))
        return updates

    def _check_rows(self, modality: Modality, index: int, content: Content, sent: int | None, kwargs: Any) -> None:
        rows, where = content.way.laid.num_embeds, f"{modality.where}[{index}]"
        if sent is not None and sent != rows:
            raise InputError(where, f"{rows} embedding row(s)", str(sent))
        # a request's own options may make more of an item than those of the server do
        if modality.bounded and not kwargs and rows > (most := self._most(modality.name)[1]):
            expected = f"at most {most} encoder row(s), as the stated largest item has"
            raise InputError(where, expected, str(rows), "Send a smaller item.")

    # only index
    @override
    def _recompute_cached_prompt_update(self, cached_update: Any, new_item_idx: int) -> Any:
        content = cached_update.content.moved(new_item_idx)
        return replace(cached_update, item_idx=new_item_idx, target=target_of(content.way), content=content)

    @override
    def _apply_prompt_updates(self, token_ids: list[int], mm_prompt_updates: Any) -> tuple[list[int], dict[str, Any]]:
        items = {}
        for name, alternatives in mm_prompt_updates.items():
            items[name] = [[update.content.way for update in ways] for ways in alternatives]
            for i, ways in enumerate(alternatives):
                if ways[0].modality != name:
                    where, got = f"{self.info.modalities[name].where}[{i}]", f"one of {ways[0].modality}"
                    raise InputError(where, f"the uuid of one of {name}", got, "Use each uuid for one item.")
        ids, placements = self.place(token_ids, items)
        found: dict[str, list[Any]] = {}
        for placed in placements:
            laid = items[placed.modality][placed.index][placed.way].laid
            info = PlaceholderFeaturesInfo(placed.modality, placed.index, placed.start, laid.ids, laid.is_embed)
            found.setdefault(placed.modality, []).append(info)
        return ids, found

    def place(self, prompt: list[int], items: Mapping[str, Any]) -> tuple[list[int], list[Any]]:
        """Bring the layouts of all items into a prompt. Where targets of several modalities match at the same place, or
        anchors are the same, the order of the modalities decides."""
        present = {name: items[name] for name in self.info.modalities if items.get(name)}
        surplus, tok = self.info.surplus, self.info.scope.tok
        self.info.check_bare(prompt, present)
        try:
            return place(prompt, present, self.info.name, surplus)
        except NotFound as error:
            if tok is None or not may_be_split(present):
                raise
            try:
                ids, placements = place_in_text(prompt, present, self.info.name, surplus, tok)
                self.info.check_bare(ids, present)
            except Exception:  # not found in the text either, or the tokenizer cannot decode the prompt
                raise error from None
            return ids, placements


class EncDecProcessor(Processor, EncDecMultiModalProcessor[ProcessingInfo]):
    """Turns items into fields and placeholders; they go into the encoder's prompt."""

    @override
    def create_encoder_prompt(self, prompt: Any, *_items: Any, **_more: Any) -> Any:
        return prompt

    @override
    def create_decoder_prompt(self, prompt: Any, *_items: Any, **_more: Any) -> Any:
        ids = self.info.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        return self.info.rewrite("decoder_prompt", ids)


def _tensor_post_init(self: Any) -> None:
    """`Tensor.__post_init__` of an ejected file: what `Tensor.bind` does of mmkit's."""
    most = tuple(getattr(size, "most", size) for size in self.shape)
    object.__setattr__(self, "_rank", len(self.shape))
    object.__setattr__(self, "bound", magnitude(self.bound, self.torch_dtype))
    object.__setattr__(self, "largest", rows_of(self.largest) if self.largest is not None else (most,))


def _media_post_init(self: Any) -> None:
    """`Image.__post_init__` of an ejected file, and that of `Video`."""
    object.__setattr__(self, "largest", rows_of(self.largest))


def rows_of(value: Any) -> tuple[tuple[Any, ...], ...]:
    """One shape, or several, as a tuple of shapes."""
    several = isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple))
    return tuple(tuple(row) if isinstance(row, (list, tuple)) else (row,) for row in (value if several else [value]))
