"""The subject of the laws: a processor, and strategies for its requests."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from traceback import walk_tb
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ..errors import OptionsError, SpecError
from ..generate import Classes
from ..language.items import SCOPES
from ..language.layout import as_text
from ..model_spec import ModelSpec
from ..plan.merging import MergedRuns
from ..plan.plan import Plan
from . import vllm_path
from .strategies import Request, Sample, as_sample, items, items_of_vllm, overwrite, spelling
from .vllm_path import Caches, Data, Outcome, Piece

Samples = Mapping[str, SearchStrategy[Any]]
_NONE: Data = {}


@dataclass(eq=False, repr=False)
class Subject:
    """A processor under test.

    Attributes:
        processor: vLLM's processor object, generated or written by hand.
        samples: per modality, a strategy for its items: samples, or values as a caller sends them.
        kwargs: a strategy for `mm_processor_kwargs`: the given one, else one over the options that
            the Hugging Face processor names.
        plan: the bound spec, for a generated processor.
        model_dir: the checkpoint folder.
        has_own_kwargs: whether a strategy for `mm_processor_kwargs` was given.
    """

    processor: Any
    samples: Samples
    _: KW_ONLY
    model_dir: str | Path
    kwargs: SearchStrategy[Data] | None = None
    plan: Plan | None = None

    def __post_init__(self) -> None:
        self.samples = {name: own.map(as_sample) for name, own in self.samples.items()}
        self.has_own_kwargs = self.kwargs is not None
        if self.kwargs is None:
            self.kwargs = _kwargs_of(self.processor)
        scopes = self._scopes
        if len(scopes) > 1:
            self.kwargs |= st.builds(_InScope, self.kwargs, st.sampled_from(scopes))

    @property
    def _scopes(self) -> list[str]:
        """The keys of `mm_processor_kwargs` that hold options for items of one drawn modality
        alone."""
        if self.plan is None:
            scopes = {_SCOPES_OF_VLLM.get(name, "") for name in self.samples}
        else:
            scopes = {modality.item.scope for modality in self.plan.modalities.values()}
        return sorted(scopes - {""})

    @property
    def limits(self) -> dict[str, int | None]:
        """The most items of each modality in one request; without those that take none."""
        limits = self.processor.info.get_supported_mm_limits()
        return {name: limits[name] for name in self.samples if limits.get(name, 0) != 0}

    @property
    def undrawn(self) -> list[str]:
        """The modalities without a strategy for their items."""
        limits = self.processor.info.get_supported_mm_limits()
        return [name for name, limit in limits.items() if limit != 0 and name not in self.samples]

    def run(self, request: Request, caches: Caches | None = None) -> Outcome:
        """The outcome of a request. With caches, its items are overwritten afterwards: what is
        cached must not be the caller's memory."""
        data = request.data()
        done = vllm_path.run(self.processor, request.prompt, data, request.kwargs, caches)
        for name, values in data.items() if caches else ():
            for sample, value in zip(request.items[name], values, strict=True):
                overwrite(sample, value)
        return done

    def pieces(self, name: str, samples: Sequence[Sample], kwargs: Data = _NONE) -> list[Piece]:
        """The ids of items in a prompt, by the processor's own updates."""
        values = [sample.value() for sample in samples]
        try:
            return vllm_path.pieces(self.processor, name, values, kwargs)
        except Exception as error:
            options = f", mm_processor_kwargs {dict(kwargs)!r}" if kwargs else ""
            error.add_note(f"in the processing of {name}: {samples!r}{options}")
            raise

    def pieces_of(self, request: Request) -> dict[str, list[Piece]]:
        """The ids of the items of a request, by modality."""
        kwargs = request.kwargs
        return {name: self.pieces(name, own, kwargs) for name, own in request.items.items()}

    def postprocessed(self, request: Request) -> list[int]:
        """The prompt in which items are placed: the caller's prompt after the spec's `prompt`, or
        after the hooks of a hand-written processor; an encoder may have its own prompt."""
        prompt = list(request.prompt)
        encoder_prompt = getattr(self.processor, "create_encoder_prompt", None)
        if encoder_prompt is not None:
            prompt = list(encoder_prompt(prompt, vllm_path.parsed(self.processor, request.data())))
        if self.plan is not None:
            return list(self.plan.rewrite("prompt", prompt, request.counts))
        return list(getattr(self.processor, "_postprocess_prompt", list)(prompt))

    @property
    def runs(self) -> MergedRuns:
        """The tokens that merge at the edges of layouts."""
        return MergedRuns(None, None, "") if self.plan is None else self.plan.runs

    @cached_property
    def vocabulary_size(self) -> int:
        return int(self.processor.info.ctx.model_config.get_vocab_size())

    @cached_property
    def ordinary(self) -> list[int]:
        """Some ids that are not special, and stand for no item."""
        tokenizer, size = self.processor.info.ctx.tokenizer, self.vocabulary_size
        if tokenizer is not None:
            size = min(size, len(tokenizer))
        taken = {*getattr(tokenizer, "all_special_ids", ())}
        if self.plan is not None:
            targets = [m.layout_evaluator.targets() for m in self.plan.modalities.values()]
            taken.update(self.plan.embed_ids, *chain(*targets))
        return [token for token in range(0, size, max(1, size // 64)) if token not in taken]

    @cached_property
    def first(self) -> list[int]:
        """The special token with which the tokenizer begins a text."""
        tokenizer = self.processor.info.ctx.tokenizer
        begin = getattr(tokenizer, "bos_token_id", None)
        return [] if begin is None or list(tokenizer.encode(""))[:1] != [begin] else [begin]

    def requests(
        self, *, least: int = 1, most: int | None = None, of: Samples | None = None
    ) -> SearchStrategy[Request]:
        """A strategy for well-formed requests. Shrinks towards few small items and a prompt without
        other tokens.

        Args:
            least: the fewest items, of all modalities together.
            most: the most items of each modality.
            of: strategies for the items, in place of `samples`.
        """
        return _requests(self, least, most, self.samples if of is None else of)

    def minimal(self, name: str, sample: Sample, kwargs: Data = _NONE) -> Request:
        """A request of one item and nothing else."""
        (piece,) = _pieces(self, name, [sample], kwargs)
        return Request([*piece.prefix, *piece.written], {name: [sample]}, kwargs)


_RUNS = 4  # the longest run of the tokens that merge that is drawn


@st.composite
def _requests(draw: Any, subject: Subject, least: int, most: int | None, of: Samples) -> Request:
    drawn = _drawn_samples(draw, subject, least, most, of)
    kwargs = draw(subject.kwargs)
    pieces = {name: _pieces(subject, name, drawn[name], kwargs) for name in drawn}
    waiting = {name: [i for i, p in enumerate(pieces[name]) if p.written] for name in pieces}
    turns = draw(st.permutations([name for name, numbers in waiting.items() for _ in numbers]))
    order = tuple((name, waiting[name].pop(0)) for name in turns)
    written = [pieces[name][i].written for name, i in order]

    every = [piece for of_modality in pieces.values() for piece in of_modality]
    prefix = next((piece.prefix for piece in every if piece.prefix), [])
    targets = [target for piece in every for target in piece.targets]
    in_layouts = {*chain(*(piece.ids for piece in every))}
    in_any = in_layouts.union(*targets)
    fragments = [[token] for token in [*subject.runs.tokens_by_length.values()][:_RUNS]]
    for ids in {tuple(ids[:-1]) for ids in written if len(ids) > 1}:
        # the beginning of a placeholder, where it is none itself
        if in_layouts.isdisjoint(ids) and not any(as_text(t) in as_text(ids) for t in targets):
            fragments.append([*ids])
    fillers = [token for token in subject.ordinary if token not in in_any] or [0]
    if not prefix and in_any.isdisjoint(subject.first):
        prefix = draw(st.sampled_from([[], subject.first]))
    gap = st.lists(st.sampled_from([*([token] for token in fillers), *fragments]), max_size=3)
    prompt = [*prefix, *chain(*draw(gap))]
    for own in written:
        prompt += [*own, *chain(*draw(gap))]
    return Request(prompt, drawn, kwargs, order)


def _drawn_samples(
    draw: Any, subject: Subject, least: int, most: int | None, of: Samples
) -> dict[str, list[Sample]]:
    limits = {name: max(4, least) if own is None else own for name, own in subject.limits.items()}
    drawn: dict[str, list[Sample]] = {}
    for name, limit in limits.items():
        drawn[name] = draw(st.lists(of[name], max_size=min(4, limit, most or limit)))
    for name, limit in limits.items():  # the first modalities fill up to the least number
        missing = least - sum(map(len, drawn.values()))
        drawn[name] += [draw(of[name]) for _ in range(min(missing, limit - len(drawn[name])))]
    return {name: samples for name, samples in drawn.items() if samples}


def _pieces(subject: Subject, name: str, samples: list[Sample], kwargs: Data) -> list[Piece]:
    # items that are accepted alone and refused together are for the law to find
    for parts in ([samples], [[one] for one in samples]):
        try:
            return [piece for part in parts for piece in subject.pieces(name, part, kwargs)]
        except Exception as error:
            if not _is_refusal(subject, kwargs, error):
                raise
    reject()


def _is_refusal(subject: Subject, kwargs: Data, error: Exception) -> bool:
    """Whether the refusal of items is legitimate, for example of an image one pixel wide, or a
    Hugging Face processor fails at an option that the kit itself chose. A fault of the spec is not
    legitimate, nor that it fails with options that its author states."""
    has_own_kwargs = subject.has_own_kwargs and not isinstance(kwargs, _InScope)
    if isinstance(error, OptionsError):
        return not has_own_kwargs
    if isinstance(error, ValueError):
        return not isinstance(error, SpecError)
    if has_own_kwargs or not kwargs:
        return False
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


_LIBRARIES = ("transformers", "torch", "torchvision", "numpy", "PIL")


# -- options ---------------------------------------------------------------------------------------

_SCOPES_OF_VLLM = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}


class _InScope(dict[str, Any]):
    """Options for the items of one modality alone; those that are in a scope stay there."""

    def __init__(self, options: Data, scope: str) -> None:
        flat = {name: value for name, value in options.items() if name not in SCOPES}
        others = {name: value for name, value in options.items() if name in SCOPES}
        if flat:
            others[scope] = {**(others.get(scope) or {}), **flat}
        super().__init__(others)


_PARTS = ("image_processor", "video_processor", "feature_extractor")

# Options by which callers change what an item becomes, and a value that few have as the default.
# What a processor was trained with (its patches, its mean) is none of them.
_OTHERWISE = {
    **dict.fromkeys(("crop_to_patches", "do_image_splitting", "do_normalize"), False),
    **dict.fromkeys(("dynamic_image_size", "use_thumbnail"), False),
    **dict.fromkeys(("max_crops", "max_dynamic_patch", "max_patches"), 2),
    **dict.fromkeys(("max_slice_nums", "num_crops"), 2),
    "do_pan_and_scan": True,
    "max_image_tokens": 8,
}

# Options that together make bytes in place of floats.
_AS_BYTES = {"do_rescale": False, "do_normalize": False}

# Options with a half of their own value; of a mapping, a half of each.
_HALVED = ("size", "min_pixels", "max_pixels", "max_image_size")


def _kwargs_of(processor: Any) -> SearchStrategy[Data]:
    """None, or one of the options that nobody has stated: those that the Hugging Face processor, or
    a part of it, names. Shrinks towards none."""
    try:
        hf_processor = processor.info.get_hf_processor()
        parts = [hf_processor, *(getattr(hf_processor, name, None) for name in _PARTS)]
        options = {key: value for part in parts for key, value in _options(part).items()}
        named = {name for part in parts if part is not None for name in _named(part)}
    except Exception:  # each processing info says in a way of its own that there is none
        return st.just(_NONE)
    drawn = [_NONE, *({name: options[name]} for name in sorted(options))]
    if named.issuperset(_AS_BYTES):
        drawn.append(_AS_BYTES)
    return st.sampled_from(drawn)


def _named(part: Any) -> set[str]:
    """The options that a processor, or a part of one, names."""
    named = {*inspect.signature(getattr(part, "preprocess", part.__call__)).parameters}
    for of_class in getattr(getattr(part, "valid_kwargs", None), "__mro__", ()):
        named |= {*getattr(of_class, "__annotations__", {})}
    return named


def _options(part: Any) -> dict[str, Any]:
    if part is None:
        return {}
    named = _named(part)
    halves = {name: half for name in _HALVED if (half := _half(getattr(part, name, None)))}
    return {name: value for name, value in (_OTHERWISE | halves).items() if name in named}


def _half(value: Any) -> Any:
    """Half of a number, or of each number of sizes by name; None of anything else."""
    if isinstance(value, int):
        return value // 2
    try:
        sizes = dict(value)  # transformers has a class of its own for these
    except TypeError:
        return None
    halves = {key: _half(size) for key, size in sizes.items() if size is not None}
    return halves if all(halves.values()) else None


# -- subjects --------------------------------------------------------------------------------------


def of_spec(
    spec: ModelSpec,
    model_dir: str | Path,
    *,
    classes: Classes | None = None,
    kwargs: SearchStrategy[Data] | None = None,
    samples: Samples | None = None,
    **options: Any,
) -> Subject:
    """The generated processor of a spec on a checkpoint folder.

    Args:
        spec: the declaration.
        model_dir: config, tokenizer and processor files; weights are not needed.
        classes: what to check in place of the spec's `classes`, for example
            ``spec.classes._replace(processor=...)`` with a subclass of the generated one.
        kwargs: a strategy for `mm_processor_kwargs`; None for the options that the Hugging Face
            processor names (`st.just({})` for no options).
        samples: strategies for the items of some modalities, in place of those of their item types.
        options: options of vLLM's ModelConfig.

    Raises:
        SpecError: the spec does not fit the checkpoint.
    """
    options = {"enable_mm_embeds": any(m.embeds for m in spec.modalities), **options}
    config, given = vllm_path.config_for_spec(model_dir, **options), samples or {}
    instance = vllm_path.generated(classes or spec.classes, config)
    plan: Plan = instance.info.plan
    words = special_texts(plan)
    drawn = {
        name: spelling(items(m.item), m.item, [*words.keys() - m.learned.placeholder_texts])
        for name, m in plan.modalities.items()
        if name not in given
    }
    return Subject(instance, {**drawn, **given}, model_dir=model_dir, kwargs=kwargs, plan=plan)


def special_texts(plan: Plan) -> dict[str, int]:
    """The special tokens of a plan's tokenizer by their texts, without that for unknown texts."""
    if plan.vocabulary is None:
        return {}
    texts, unknown = plan.vocabulary.special_texts, plan.vocabulary.unknown
    return {text: token for text, token in texts.items() if token != unknown}


def of_registered(
    model_dir: str | Path,
    *,
    kwargs: SearchStrategy[Data] | None = None,
    samples: Samples | None = None,
    **options: Any,
) -> Subject:
    """The processor that vLLM, or a plugin, has for a checkpoint.

    Args:
        model_dir: as for `of_spec`.
        kwargs: as for `of_spec`.
        samples: as for `of_spec`. The defaults are images of 4 to 96 pixels per side, videos of up
            to 6 frames of 64 x 64, and audio of up to 16,000 samples.
        options: options of vLLM's ModelConfig.
    """
    processor = vllm_path.registered(vllm_path.model_config(model_dir, **options))
    known = processor.info.get_supported_mm_limits()
    drawn = {name: strategy for name, strategy in items_of_vllm().items() if name in known}
    return Subject(processor, {**drawn, **(samples or {})}, model_dir=model_dir, kwargs=kwargs)
