"""The subject of the laws: a processor, and strategies for its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from traceback import walk_tb
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ..errors import OptionsError, SpecError
from ..generate import Classes
from ..language.layout import make_id_string
from ..model_spec import ModelSpec
from ..plan.merging import MergedRuns
from ..plan.plan import Plan
from ..vllm_api import checkpoint_processors
from . import updates, vllm_path
from .options import NO_OPTIONS, SCOPES_OF_VLLM, ScopedOptions, hf_options
from .strategies import Request, Sample, as_sample, items, items_of_vllm, overwrite, spelling
from .updates import ItemUpdate
from .vllm_path import Caches, Data, Outcome

Samples = Mapping[str, SearchStrategy[Any]]


@dataclass(eq=False, repr=False)
class Subject:
    """A processor under test.

    Attributes:
        processor: vLLM's processor object, generated or written by hand.
        samples: per modality, a strategy for its items: samples, or values as a caller sends them.
        kwargs: a strategy for `mm_processor_kwargs`; None for the options that the Hugging Face
            processor names.
        plan: the bound spec, for a generated processor.
        model_dir: the checkpoint folder.
        has_given_kwargs: whether a strategy for `mm_processor_kwargs` was given.
    """

    processor: Any
    samples: Samples
    _: KW_ONLY
    model_dir: str | Path
    kwargs: SearchStrategy[Data] | None = None
    plan: Plan | None = None

    def __post_init__(self) -> None:
        self.samples = {name: values.map(as_sample) for name, values in self.samples.items()}
        self.has_given_kwargs = self.kwargs is not None
        if self.kwargs is None:
            self.kwargs = hf_options(self.processor)
        scopes = self._scopes
        if len(scopes) > 1:
            self.kwargs |= st.builds(ScopedOptions, self.kwargs, st.sampled_from(scopes))

    @property
    def _scopes(self) -> list[str]:
        """The keys of `mm_processor_kwargs` that hold the options of one drawn modality."""
        scopes = set()
        if self.plan is None:
            for name in self.samples:
                scopes.add(SCOPES_OF_VLLM.get(name, ""))
        else:
            for modality in self.plan.modalities.values():
                scopes.add(modality.item.kwargs_scope)
        return sorted(scopes - {""})

    @property
    def limits(self) -> dict[str, int | None]:
        """The most items of each modality in one request, without modalities that take none."""
        supported = self.processor.info.get_supported_mm_limits()
        limits = {}
        for name in self.samples:
            if supported.get(name, 0) != 0:
                limits[name] = supported[name]
        return limits

    @property
    def ids_only(self) -> frozenset[str]:
        """The modalities whose items become ids only; none of a hand-written processor."""
        if self.plan is None:
            return frozenset()
        names = [name for name, modality in self.plan.modalities.items() if modality.is_ids_only]
        return frozenset(names)

    @property
    def undrawn(self) -> list[str]:
        """The modalities without a strategy for their items."""
        supported = self.processor.info.get_supported_mm_limits()
        undrawn = []
        for name, limit in supported.items():
            if limit != 0 and name not in self.samples:
                undrawn.append(name)
        return undrawn

    def describe_undrawn(self) -> str:
        """Return the names of the modalities without a strategy, for messages."""
        return " and ".join(self.undrawn) or "some modality"

    # -- runs --------------------------------------------------------------------------------------

    def run(self, request: Request, caches: Caches | None = None) -> Outcome:
        """Return the outcome of a request.

        With caches, the request's items are overwritten afterwards: what is cached must not be the
        caller's memory.
        """
        data = request.data()
        outcome = vllm_path.run(self.processor, request.prompt, data, request.kwargs, caches)
        if caches is not None:
            for name, values in data.items():
                for sample, value in zip(request.items[name], values, strict=True):
                    overwrite(sample, value)
        return outcome

    def find_updates(
        self, name: str, samples: Sequence[Sample], kwargs: Data = NO_OPTIONS
    ) -> list[ItemUpdate]:
        """Return the processor's own updates for items of one modality."""
        values = [sample.value() for sample in samples]
        try:
            return updates.find_updates(self.processor, name, values, kwargs)
        except Exception as error:
            options = f", mm_processor_kwargs {dict(kwargs)!r}" if kwargs else ""
            error.add_note(f"in the processing of {name}: {samples!r}{options}")
            raise

    def find_request_updates(self, request: Request) -> dict[str, list[ItemUpdate]]:
        """Return the processor's own updates for the items of a request, by modality."""
        by_modality = {}
        for name, samples in request.items.items():
            by_modality[name] = self.find_updates(name, samples, request.kwargs)
        return by_modality

    def rewrite_prompt(self, request: Request) -> list[int]:
        """Return the prompt in which a request's items are placed.

        It is the caller's prompt after the spec's `prompt`, or after the hooks of a hand-written
        processor. An encoder may have its own prompt.
        """
        prompt = list(request.prompt)
        create_encoder_prompt = getattr(self.processor, "create_encoder_prompt", None)
        if create_encoder_prompt is not None:
            parsed_items = vllm_path.parse_items(self.processor, request.data())
            prompt = list(create_encoder_prompt(prompt, parsed_items))
        if self.plan is not None:
            return list(self.plan.rewrite("prompt", prompt, request.counts))
        postprocess = getattr(self.processor, "_postprocess_prompt", None)
        if postprocess is not None:
            prompt = list(postprocess(prompt))
        return prompt

    # -- tokens ------------------------------------------------------------------------------------

    @property
    def runs(self) -> MergedRuns:
        """The tokens that merge at the edges of layouts."""
        if self.plan is None:
            return MergedRuns(None, None, "")
        return self.plan.runs

    @cached_property
    def vocabulary_size(self) -> int:
        """The number of ids that the model takes."""
        return int(self.processor.info.ctx.model_config.get_vocab_size())

    @cached_property
    def ordinary_ids(self) -> list[int]:
        """About 64 ids, spread over the vocabulary, that are not special and stand for no item."""
        tokenizer = self.processor.info.ctx.tokenizer
        size = self.vocabulary_size
        if tokenizer is not None:
            size = min(size, len(tokenizer))
        reserved = set(getattr(tokenizer, "all_special_ids", ()))
        if self.plan is not None:
            reserved.update(self.plan.embed_ids)
            for modality in self.plan.modalities.values():
                for target in modality.layout_evaluator.targets():
                    reserved.update(target)
        step = max(1, size // 64)
        return [token for token in range(0, size, step) if token not in reserved]

    @cached_property
    def bos_ids(self) -> list[int]:
        """The special token with which the tokenizer begins a text; empty for none."""
        tokenizer = self.processor.info.ctx.tokenizer
        bos = getattr(tokenizer, "bos_token_id", None)
        if bos is None or list(tokenizer.encode(""))[:1] != [bos]:
            return []
        return [bos]

    # -- requests ----------------------------------------------------------------------------------

    def requests(
        self, *, least: int = 1, most: int | None = None, of: Samples | None = None
    ) -> SearchStrategy[Request]:
        """Return a strategy for well-formed requests.

        Shrinks towards few small items and a prompt without other tokens.

        Args:
            least: the fewest items, of all modalities together.
            most: the most items of each modality.
            of: strategies for the items, in place of `samples`.
        """
        samples = self.samples if of is None else of
        return _draw_request(self, least, most, samples)

    def make_minimal_request(self, name: str, sample: Sample, kwargs: Data = NO_OPTIONS) -> Request:
        """Return a request of one item whose prompt has nothing else."""
        (update,) = _find_updates_or_reject(self, name, [sample], kwargs)
        return Request(update.prefix + update.target, {name: [sample]}, kwargs)


# -- the drawing of requests -----------------------------------------------------------------------

_MAX_ITEMS = 4  # of each modality in a drawn request, where a law needs no more
_MAX_GAP = 3  # stretches of other tokens between two items
_MAX_RUN_TOKENS = 4  # tokens that merge, of those that are drawn between items


@st.composite
def _draw_request(
    draw: Any, subject: Subject, least: int, most: int | None, strategies: Samples
) -> Request:
    samples = _draw_samples(draw, subject, least, most, strategies)
    kwargs = draw(subject.kwargs)
    updates = {}
    for name in samples:
        updates[name] = _find_updates_or_reject(subject, name, samples[name], kwargs)
    order = _draw_order(draw, updates)
    targets = [updates[name][index].target for name, index in order]
    prompt = _draw_prompt(draw, subject, updates, targets)
    return Request(prompt, samples, kwargs, order)


def _draw_samples(
    draw: Any, subject: Subject, least: int, most: int | None, strategies: Samples
) -> dict[str, list[Sample]]:
    limits = {}
    for name, limit in subject.limits.items():
        if name not in strategies:
            continue
        limits[name] = max(_MAX_ITEMS, least) if limit is None else limit
    drawn: dict[str, list[Sample]] = {}
    for name, limit in limits.items():
        max_size = min(_MAX_ITEMS, limit, most or limit)
        drawn[name] = draw(st.lists(strategies[name], max_size=max_size))
    # the first modalities are filled up until there are `least` items
    for name, limit in limits.items():
        missing = least - sum(len(samples) for samples in drawn.values())
        room = limit - len(drawn[name])
        for _ in range(min(missing, room)):
            drawn[name].append(draw(strategies[name]))
    return {name: samples for name, samples in drawn.items() if samples}


def _draw_order(
    draw: Any, updates: Mapping[str, Sequence[ItemUpdate]]
) -> tuple[tuple[str, int], ...]:
    """Draw an order for the items that have a target.

    Modalities mix, but the items of one modality keep their order: the first target of a modality
    is that of its first item.
    """
    with_target: dict[str, list[int]] = {}
    turns: list[str] = []
    for name, of_modality in updates.items():
        with_target[name] = [i for i, update in enumerate(of_modality) if update.target]
        turns += [name] * len(with_target[name])
    order = []
    for name in draw(st.permutations(turns)):
        order.append((name, with_target[name].pop(0)))
    return tuple(order)


def _draw_prompt(
    draw: Any,
    subject: Subject,
    updates: Mapping[str, Sequence[ItemUpdate]],
    targets: Sequence[list[int]],
) -> list[int]:
    """Draw a prompt that has these targets in their order, and other tokens between them."""
    prefix: list[int] = []
    in_layouts: set[int] = set()
    all_targets: list[list[int]] = []
    for of_modality in updates.values():
        for update in of_modality:
            prefix = prefix or update.prefix
            in_layouts.update(update.ids)
            all_targets += update.all_targets
    of_items = in_layouts.union(*all_targets)

    stretches = []
    for token in subject.ordinary_ids:
        if token not in of_items:
            stretches.append([token])
    if not stretches:
        stretches.append([0])
    for token in list(subject.runs.tokens_by_length.values())[:_MAX_RUN_TOKENS]:
        stretches.append([token])
    stretches += _find_partial_targets(targets, all_targets, in_layouts)

    if not prefix and of_items.isdisjoint(subject.bos_ids):
        prefix = draw(st.sampled_from([[], subject.bos_ids]))
    gaps = st.lists(st.sampled_from(stretches), max_size=_MAX_GAP)
    prompt = list(prefix)
    for stretch in draw(gaps):
        prompt += stretch
    for target in targets:
        prompt += target
        for stretch in draw(gaps):
            prompt += stretch
    return prompt


def _find_partial_targets(
    targets: Sequence[list[int]], all_targets: Sequence[list[int]], in_layouts: set[int]
) -> list[list[int]]:
    """Return the targets of several tokens without their last token.

    Such a beginning of a target is ordinary text, which a search for targets must leave alone. A
    beginning that has a whole target in it, or a token of a layout, stands for an item and is left
    out.
    """
    texts = [make_id_string(target) for target in all_targets]
    beginnings = set()
    for target in targets:
        if len(target) > 1:
            beginnings.add(tuple(target[:-1]))
    partial_targets = []
    for beginning in beginnings:
        text = make_id_string(beginning)
        has_target = any(target_text in text for target_text in texts)
        if not has_target and in_layouts.isdisjoint(beginning):
            partial_targets.append(list(beginning))
    return partial_targets


def _find_updates_or_reject(
    subject: Subject, name: str, samples: list[Sample], kwargs: Data
) -> list[ItemUpdate]:
    """Return the updates for drawn items, or reject the draw where the processor refuses an item.

    Items that are accepted one by one and refused together are a mistake of the processor, which a
    law must find: their updates are the updates of the single items.
    """
    try:
        return subject.find_updates(name, samples, kwargs)
    except Exception as error:
        if not _is_legitimate_refusal(subject, kwargs, error):
            raise
    item_updates = []
    for sample in samples:
        try:
            item_updates += subject.find_updates(name, [sample], kwargs)
        except Exception as error:
            if not _is_legitimate_refusal(subject, kwargs, error):
                raise
            reject()
    return item_updates


# Libraries that may fail at an option which the kit chose.
_LIBRARIES = ("transformers", "torch", "torchvision", "numpy", "PIL")


def _is_legitimate_refusal(subject: Subject, kwargs: Data, error: Exception) -> bool:
    """Return whether a processor may refuse items with an exception.

    It may refuse an item, for example an image one pixel wide. A Hugging Face processor may also
    fail at an option that the kit itself chose. A fault of the spec is no legitimate refusal, nor
    is any failure but a ValueError with options that the author of the spec gave.
    """
    is_chosen_by_author = subject.has_given_kwargs and not isinstance(kwargs, ScopedOptions)
    if isinstance(error, OptionsError):
        return not is_chosen_by_author
    if isinstance(error, ValueError):
        return not isinstance(error, SpecError)
    if is_chosen_by_author or not kwargs:
        return False
    innermost, _ = list(walk_tb(error.__traceback__))[-1]
    library = str(innermost.f_globals.get("__name__")).partition(".")[0]
    return library in _LIBRARIES


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
    """Return the generated processor of a spec on a checkpoint folder.

    Args:
        spec: the declaration.
        model_dir: config, tokenizer and processor files; weights are not needed.
        classes: what to check in place of the spec's `classes`, for example
            ``spec.classes._replace(processor=...)`` with a subclass of the generated one.
        kwargs: a strategy for `mm_processor_kwargs`; None for the options that the Hugging Face
            processor names (`st.just({})` for no options).
        samples: strategies for the items of some modalities, in place of their item types'.
        options: options of vLLM's ModelConfig.

    Raises:
        SpecError: the spec does not fit the checkpoint.
    """
    takes_embeds = any(modality.embeds for modality in spec.modalities)
    options.setdefault("enable_mm_embeds", takes_embeds)
    config = checkpoint_processors.load_config_for_spec(model_dir, **options)
    processor = checkpoint_processors.make_processor(classes or spec.classes, config)
    plan: Plan = processor.info.plan
    strategies: dict[str, SearchStrategy[Any]] = {}
    given_strategies = samples or {}
    words = special_texts(plan)
    for name, modality in plan.modalities.items():
        if name not in given_strategies:
            # a text that spells a placeholder is refused, which is for the law `refusal` to check
            spelled = [word for word in words if word not in modality.parser.placeholder_texts]
            strategies[name] = spelling(items(modality.item), modality.item, spelled)
    strategies.update(given_strategies)
    return Subject(processor, strategies, model_dir=model_dir, kwargs=kwargs, plan=plan)


def special_texts(plan: Plan) -> dict[str, int]:
    """Return the special tokens of a plan's tokenizer by their texts.

    The token for unknown texts is left out.
    """
    if plan.vocabulary is None:
        return {}
    texts = {}
    for text, token in plan.vocabulary.special_texts.items():
        if token != plan.vocabulary.unknown_id:
            texts[text] = token
    return texts


def of_registered(
    model_dir: str | Path,
    *,
    kwargs: SearchStrategy[Data] | None = None,
    samples: Samples | None = None,
    **options: Any,
) -> Subject:
    """Return the processor that vLLM, or a plugin, has for a checkpoint.

    Args:
        model_dir: as for `of_spec`.
        kwargs: as for `of_spec`.
        samples: as for `of_spec`. The defaults are images of 4 to 96 pixels per side, videos of up
            to 6 frames of 64 x 64, and audio of up to 16,000 samples.
        options: options of vLLM's ModelConfig.
    """
    config = checkpoint_processors.load_model_config(model_dir, **options)
    processor = checkpoint_processors.make_registered_processor(config)
    supported = processor.info.get_supported_mm_limits()
    strategies: dict[str, SearchStrategy[Any]] = {}
    for name, strategy in items_of_vllm().items():
        if name in supported:
            strategies[name] = strategy
    strategies.update(samples or {})
    return Subject(processor, strategies, model_dir=model_dir, kwargs=kwargs)
