"""Binding: a spec, a config and a tokenizer become a complete, frozen plan, or an error.

`bind` makes the plan of a server. It evaluates everything that depends only on config and
vocabulary, rehearses the modalities on a few items, and computes the guard of placeholder ids.
`plan_for_options` makes plans for the options of requests in the same way, but without a rehearsal:
they have the guard of the server's plan, and what it has learned from the items of the spec.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import ErrorCollector, SpecError, locate_errors, report_as_options_error
from ..language.expr import Scope, holds
from ..language.items import flatten_options
from ..language.layout import EndingWith, Fixed, Target
from ..language.node import fold
from ..language.spec import Declaration
from ..language.vocabulary import Vocabulary, describe_ids, read_text_config, read_vocab_size
from .guard import IdRecorder, PlaceholderGuard, spell_token
from .memo import Memo, options_key
from .merging import MergedRuns
from .modality import BoundModality, Environment, bind_modality, complete_modality
from .output import BoundOutput
from .placement import ReservedTargets
from .plan import Part, Plan
from .policy import BoundPolicy, bind_policy
from .rehearsal import rehearse

MAX_PLANS_FOR_OPTIONS = 64
"""Plans that are cached for distinct `mm_processor_kwargs`."""


def bind(
    spec: Declaration,
    config: Any,
    tokenizer: Any = None,
    processor: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Bind a spec to a config and a tokenizer.

    Args:
        spec: the declaration.
        config: the Hugging Face config of the model.
        tokenizer: its tokenizer; None for a model that runs without one.
        processor: its Hugging Face processor, for specs that use `proc` or `hf()`.
        kwargs: `mm_processor_kwargs` of every request.
        max_model_len: the longest context, into which the largest item has to fit; None for any.
        dtype: the dtype of the language model; None leaves floats of Hugging Face processors as
            they are.

    Raises:
        SpecError: the first mistake of the spec; `others` has the others.
    """
    vocabulary = _make_vocabulary(spec, tokenizer)
    environment = Environment(
        model=spec.name,
        scope=Scope(cfg=config, proc=processor, tok=vocabulary, kwargs=dict(kwargs or {})),
        dtype=dtype,
        # a model of raw input may have no ids; any id will do for its prompt
        vocab_size=read_vocab_size(config, sys.maxunicode if spec.is_raw else None),
        # the items of an encoder-decoder model do not count towards the decoder's context
        max_model_len=max_model_len if spec.decoder_prompt is None else None,
    )
    errors = ErrorCollector()
    parts = _bind_parts(spec, environment, errors)
    for name, modality in parts.modalities.items():
        with errors.collect():
            parts.modalities[name] = rehearse(modality)
    errors.raise_first()

    guard = PlaceholderGuard(spec.name, _find_owners(parts.recorders), vocabulary)
    _check_never_in_texts(spec, guard, config)
    _check_literals(spec, guard, parts)
    placeholder_texts: list[str] = []
    if vocabulary is not None:
        placeholder_texts = vocabulary.find_texts(
            _find_tokens_of_items(guard, parts.reserved_targets)
        )
        placeholder_texts += _find_text_targets_of_ids(parts.modalities.values(), vocabulary)
    for name, modality in parts.modalities.items():
        parts.modalities[name] = complete_modality(
            modality,
            guard,
            placeholder_texts,
            copies_outputs=modality.field_processor.copies_outputs,
        )
    outputs: dict[str, BoundOutput] = {}
    scope = Scope(cfg=config, tok=vocabulary)
    for output in spec.list_outputs(scope):
        outputs[output.name] = BoundOutput(
            output, spec.name, scope, environment.vocab_size, guard.ids
        )
    policy = bind_policy(spec.policy, spec.name, scope, parts.modalities, outputs)
    return parts.make_plan(spec, environment, guard, outputs, policy)


def plan_for_options(plan: Plan, kwargs: Mapping[str, Any], processor: Any) -> Plan:
    """Return the plan for the `mm_processor_kwargs` of one request.

    Plans for distinct options are cached.

    Args:
        plan: the server's plan.
        kwargs: the options of the request, merged with those of every request.
        processor: the Hugging Face processor that these options configure.

    Raises:
        InputError: options with which the spec cannot be bound.
    """

    def make() -> Plan:
        return rebind(plan, kwargs, processor)

    with report_as_options_error(plan.options_where):
        if kwargs == plan.environment.scope.kwargs:
            return plan
        return plan.plans_for_options.get(options_key(kwargs), make)


def rebind(plan: Plan, kwargs: Mapping[str, Any], processor: Any) -> Plan:
    """Bind the spec of a plan with other options.

    Nothing is rehearsed: what the server's plan has learned from the items of the spec holds.

    Args:
        plan: the server's plan.
        kwargs: the options.
        processor: the Hugging Face processor that these options configure.

    Raises:
        SpecError: the first mistake, among them placeholder ids that the guard of the plan does not
            have; `others` has the others.
    """
    scope = replace(plan.environment.scope, proc=processor, kwargs=dict(kwargs))
    environment = replace(plan.environment, scope=scope)
    errors = ErrorCollector()
    parts = _bind_parts(plan.spec, environment, errors, plan)
    errors.raise_first()
    guard = plan.guard.for_options()
    for name, modality in parts.modalities.items():
        base = plan.modalities[name]
        parts.modalities[name] = complete_modality(
            modality,
            guard,
            base.parser.placeholder_texts,
            copies_outputs=base.field_processor.copies_outputs,
        )
    # outputs and a policy depend on no options
    return parts.make_plan(plan.spec, environment, guard, plan.outputs, plan.policy)


# -- the parts of a spec ---------------------------------------------------------------------------


@dataclass
class _Parts:
    """The bound parts of a spec, until the plan is made.

    Attributes:
        modalities: the modalities, by name.
        recorders: of each modality, what records the ids of its layouts.
        prompts: the bound `prompt` and `decoder_prompt`.
        reserved_targets: the targets that can only stand for items, each with its modality.
        runs: the tokens that merge where a layout meets its prompt.
    """

    modalities: dict[str, BoundModality] = field(default_factory=dict)
    recorders: dict[str, IdRecorder] = field(default_factory=dict)
    prompts: dict[Part, Any] = field(default_factory=dict)
    reserved_targets: dict[Target, str] = field(default_factory=dict)
    runs: MergedRuns | None = None

    def make_plan(
        self,
        spec: Declaration,
        environment: Environment,
        guard: PlaceholderGuard,
        outputs: Mapping[str, BoundOutput],
        policy: BoundPolicy | None,
    ) -> Plan:
        """Return the plan, when all parts are bound."""
        assert self.runs is not None
        return Plan(
            spec=spec,
            environment=environment,
            modalities=self.modalities,
            prompts=self.prompts,
            reserved_targets=ReservedTargets(self.reserved_targets),
            runs=self.runs,
            guard=guard,
            outputs=outputs,
            policy=policy,
            plans_for_options=Memo(MAX_PLANS_FOR_OPTIONS),
            make_for_options=plan_for_options,
        )


def _bind_parts(
    spec: Declaration, environment: Environment, errors: ErrorCollector, base: Plan | None = None
) -> _Parts:
    """Bind all parts of a spec; collect why some cannot be bound.

    Args:
        spec: the declaration.
        environment: what it is bound to.
        errors: collects the errors.
        base: the server's plan, for the options of a request.
    """
    parts = _Parts()
    scope = environment.scope
    for declared in spec.modalities:
        name = declared.name
        if base is not None and name not in base.modalities:
            continue  # the model has none
        with errors.collect():
            with locate_errors(f"{spec.name}.{name}, when"):
                kwargs_of_items = flatten_options(declared.item, scope.kwargs)
                is_present = holds(declared.when, replace(scope, kwargs=kwargs_of_items))
            if not is_present:
                continue
            if base is None:
                recorder = IdRecorder()
                parts.modalities[name] = bind_modality(declared, environment, recorder)
                parts.recorders[name] = recorder
            else:
                guard = base.guard.for_options()
                parts.modalities[name] = bind_modality(
                    declared, environment, guard, base.modalities[name]
                )
    prompt = Fixed((0,), b"\0") if spec.is_raw else spec.prompt
    with errors.collect(), locate_errors(f"{spec.name}.prompt"):
        parts.prompts["prompt"] = fold(prompt, scope)
    with errors.collect(), locate_errors(f"{spec.name}.decoder_prompt"):
        parts.prompts["decoder_prompt"] = fold(spec.decoder_prompt, scope)
    with errors.collect():
        if not parts.modalities and not errors:
            raise SpecError(spec.name, "a modality whose when= holds for the config", "none")
        parts.reserved_targets = _find_reserved_targets(parts.modalities.values(), scope.tok)
        parts.runs = MergedRuns(spec.merges, scope.tok, f"{spec.name}, merges")
    return parts


def _make_vocabulary(spec: Declaration, tokenizer: Any) -> Vocabulary | None:
    """Return the tokenizer as the spec sees it.

    Raises:
        SpecError: something else than a tokenizer.
    """
    if tokenizer is None or isinstance(tokenizer, Vocabulary):
        return tokenizer
    if not hasattr(tokenizer, "encode"):
        expected = "a config, then a tokenizer"
        got = f"a {type(tokenizer).__name__} as tokenizer"
        raise SpecError(f"{spec.name}, bind", expected, got, "Write bind(config, tokenizer).")
    return Vocabulary(tokenizer)


# -- checks of the spec as a whole -----------------------------------------------------------------


def _find_owners(recorders: Mapping[str, IdRecorder]) -> dict[int, list[str]]:
    """Return the modalities of each placeholder id."""
    owners: dict[int, list[str]] = {}
    for name, recorder in recorders.items():
        for token in sorted(recorder.embed_ids):
            owners.setdefault(token, []).append(name)
    return owners


def _find_reserved_targets(
    modalities: Iterable[BoundModality], vocabulary: Vocabulary | None
) -> dict[Target, str]:
    """Return the targets that can only stand for items, each with its modality.

    Raises:
        SpecError: two modalities share a target, so no rule says which item goes where.
    """
    owners: dict[Target, str] = {}
    reserved: dict[Target, str] = {}
    for modality in modalities:
        for target, is_reserved in modality.layout_evaluator.targets().items():
            owner = owners.setdefault(target, modality.name)
            if owner != modality.name:
                expected = "a target that no other modality has"
                got = f"{describe_ids(target, vocabulary)}, which is that of {owner} too"
                remedy = "Give each a token of its own."
                raise SpecError(f"{modality.where}, update", expected, got, remedy)
            if is_reserved:
                reserved[target] = modality.name
    return reserved


def _find_tokens_of_items(guard: PlaceholderGuard, reserved: Iterable[Target]) -> set[int]:
    """Return the tokens that stand for items: placeholders, and targets of one token."""
    tokens = set(guard.ids)
    for target in reserved:
        if len(target) == 1:
            tokens.add(target[0])
    return tokens


def _find_text_targets_of_ids(
    modalities: Iterable[BoundModality], vocabulary: Vocabulary
) -> list[str]:
    """Return the targets of several tokens of items that become ids only, as texts.

    A text in an item that spells one would be one more item when its ids are sent without it.
    """
    texts: list[str] = []
    for modality in modalities:
        if not modality.is_ids_only:
            continue
        for target in modality.layout_evaluator.targets():
            text = vocabulary.decode_target(target).strip()
            if len(target) > 1 and text:
                texts.append(text)
    return texts


def _check_never_in_texts(spec: Declaration, guard: PlaceholderGuard, config: Any) -> None:
    """Refuse placeholder ids that texts have.

    Prompts with them would be refused, and no model could sample them.

    Without a tokenizer, the config says at which ids an answer ends; an output ends after as many
    ids as it has.

    Raises:
        SpecError: names the modality and the id.
    """
    (end,) = read_text_config(config, "eos_token_id")
    end_ids = end if isinstance(end, (list, tuple)) else [end]
    for token, names in guard.owners.items():
        reason = None
        if guard.vocabulary is not None:
            reason = guard.vocabulary.explain_in_texts(token)
        elif token in end_ids and not spec.outputs:
            reason = "the config's eos_token_id, with which an answer ends"
        if reason is not None:
            where = f"{spec.name}.{names[0]}, layout"
            expected = "a placeholder id that no text has"
            remedy = "Use a special token, or a reserved id: placeholder ids are never sampled."
            raise SpecError(where, expected, f"{token}, {reason}", remedy)


def _check_literals(spec: Declaration, guard: PlaceholderGuard, parts: _Parts) -> None:
    """Refuse placeholder ids in the literals of a spec.

    Raises:
        SpecError: names the part of the spec, and the modality whose placeholder it has.
    """
    for name, modality in parts.modalities.items():
        guard.check_literals(parts.recorders[name].literal_ids, f"{modality.where}, layout", name)
        where = f"{modality.where}, update"
        for target in modality.layout_evaluator.targets():
            guard.check_literals(target, where, name)
            _check_known_tokens(target, where, guard.vocabulary)
        for prefix in modality.layout_evaluator.prefixes():
            guard.check_literals(prefix, where)
    prompt = parts.prompts["prompt"]
    if isinstance(prompt, EndingWith):
        for fixed in prompt.ids.find_fixed_parts():
            guard.check_literals(fixed.literal_ids, f"{spec.name}.prompt")


def _check_known_tokens(target: Target, where: str, vocabulary: Vocabulary | None) -> None:
    """Refuse a target with the token of all words that the tokenizer does not know.

    Raises:
        SpecError: it has that token.
    """
    if vocabulary is None or not vocabulary.encodes_unknown:
        return
    unknown = vocabulary.unknown_id
    if unknown is None or unknown not in target:
        return
    got = f"{spell_token(unknown, vocabulary)}, every word that the tokenizer does not know"
    raise SpecError(where, "a target of known tokens", got, "Use a token of its own.")
