"""A spec bound to one config and tokenizer: the compiled form that requests run through.

Binding evaluates once everything that depends on the config and the vocabulary alone. A plan
evaluates layouts once per item geometry, and caches them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import torch

from ..errors import (
    ErrorCollector,
    InputError,
    SpecError,
    convert_errors,
    locate_errors,
    report_as_options_error,
)
from ..language.expr import Scope, holds
from ..language.items import unscoped
from ..language.layout import EndingWith, Fixed, Target
from ..language.node import fold
from ..language.spec import Declaration
from ..language.vocabulary import (
    Vocabulary,
    check_spec_ids,
    describe_id,
    read_text_config,
    read_vocab_size,
)
from . import placement, text_targets
from .hf_calls import HFCall
from .memo import Memo, options_key
from .merging import MergedRuns
from .modality import BoundModality
from .output import BoundOutput
from .parsing import Taken
from .placement import EMPTY, LayoutsByModality, PlacedPrompt, Placement, PromptForm
from .processing import Processed

Part: TypeAlias = Literal["prompt", "decoder_prompt"]
"""What a spec may rewrite."""

Prompt: TypeAlias = "str | Sequence[int]"
"""A text, or token ids."""

AllTaken: TypeAlias = Mapping[str, Taken]
AllProcessed: TypeAlias = Mapping[str, Processed]
"""The items of a request, and their processed fields, by modality."""

CONFIGURED = 64
"""Plans cached for distinct `mm_processor_kwargs`."""


@dataclass(frozen=True)
class Preview:
    """A request after processing and placement.

    Attributes:
        prompt_token_ids: the prompt with the layouts in it.
        placements: the place of each item's layout, in prompt order.
        fields: per modality and item, the processed fields.
    """

    prompt_token_ids: list[int]
    placements: list[Placement]
    fields: dict[str, Processed]


class Plan:
    """A spec bound to one config and tokenizer; make it with `ModelSpec.bind`.

    Attributes:
        spec: the declaration.
        modalities: the bound modalities, by name.
        vocab_size: number of ids of the language model.
        hidden_size: width of the language model's rows; None where the config does not tell.
        dtype: that of the language model; None where the plan was bound without vLLM.
        embed_ids: the placeholder ids known without an item.
        outputs: the bound outputs, by name.
        runs: the tokens that merge where a layout meets its prompt.
    """

    embed_ids: frozenset[int]
    outputs: dict[str, BoundOutput]
    _owners: dict[int, list[str]]
    """The modalities of each placeholder id."""

    def __init__(
        self,
        spec: Declaration,
        config: Any,
        tokenizer: Any = None,
        processor: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
        dtype: torch.dtype | None = None,
        *,
        base: Plan | None = None,
    ) -> None:
        """Bind a spec.

        Args:
            base: the server's plan, for the plan of a request's options: prompts are guarded by its
                placeholder ids, and what it has learned from the items of the spec holds.

        Raises:
            SpecError: the spec cannot be bound.
        """
        is_bare = tokenizer is not None and not isinstance(tokenizer, Vocabulary)
        if is_bare and not hasattr(tokenizer, "encode"):
            expected, remedy = "a config, then a tokenizer", "Write bind(config, tokenizer)."
            got = f"a {type(tokenizer).__name__} as tokenizer"
            raise SpecError(f"{spec.name}, bind", expected, got, remedy)
        self._base = base
        self.spec, self.dtype, self._is_raw = spec, dtype, spec.is_raw
        # a model of raw input may have no ids; any id will do for its prompt
        self.vocab_size = read_vocab_size(config, sys.maxunicode if self._is_raw else None)
        # the items of an encoder-decoder model do not count towards the decoder's context
        self._max_model_len = max_model_len if spec.decoder_prompt is None else None
        self.hidden_size = hidden_size(config)
        self._ids = list[Annotated[int, msgspec.Meta(ge=0, lt=self.vocab_size)]]
        tok = Vocabulary(tokenizer) if is_bare else tokenizer
        self._configured = Memo(CONFIGURED)
        refusals = self._bind(Scope(cfg=config, proc=processor, tok=tok, kwargs=dict(kwargs or {})))
        if base is not None:
            refusals.raise_first()
            # `LayoutEvaluator` refuses other ids
            self._owners, self.embed_ids = base._owners, base.embed_ids
            self.outputs = base.outputs  # which depend on no options
            return
        for modality in self.modalities.values():
            with refusals.collect():
                modality.rehearse()
        refusals.raise_first()
        self._owners = {}
        for modality in self.modalities.values():
            for token in sorted(modality.embed_ids):
                self._owners.setdefault(token, []).append(modality.name)
        self.embed_ids = frozenset(self._owners)
        self._check_embed_ids(config, tok)
        self._check_literal_ids()
        placeholder_texts = self._placeholder_texts(tok)
        for modality in self.modalities.values():
            modality.learned.guarded = self.embed_ids
            modality.learned.placeholder_texts = placeholder_texts
        known = Scope(cfg=config, tok=tok)
        self.outputs = {
            output.name: BoundOutput(output, spec.name, known, self.vocab_size, self.embed_ids)
            for output in spec.outputs
        }

    def _bind(self, scope: Scope) -> ErrorCollector:
        """Bind all parts of the spec; returns why some cannot be bound."""
        name, self._scope = self.spec.name, scope
        self.modalities: dict[str, BoundModality] = {}
        refusals = ErrorCollector()
        for m in self.spec.modalities:
            if self._base is not None and m.name not in self._base.modalities:
                continue  # the model has none
            with refusals.collect():
                with locate_errors(f"{name}.{m.name}, when"):
                    concerning = replace(scope, kwargs=unscoped(m.item, scope.kwargs))
                    present = holds(m.when, concerning)
                if present:
                    base = self._base.modalities[m.name] if self._base else None
                    limits = self.vocab_size, self._max_model_len
                    bound = BoundModality(m, name, scope, self.dtype, *limits, base)
                    self.modalities[m.name] = bound
        prompt = Fixed((0,), b"\0") if self._is_raw else self.spec.prompt
        self._prompts: dict[Part, Any] = {}
        parts: dict[Part, Any] = {"prompt": prompt, "decoder_prompt": self.spec.decoder_prompt}
        for part, declared in parts.items():
            with refusals.collect(), locate_errors(f"{name}.{part}"):
                self._prompts[part] = fold(declared, scope)
        with refusals.collect():
            if not self.modalities and not refusals:
                raise SpecError(name, "a modality whose when= holds for the config", "none")
            self._reserved = self._reserved_targets()
            self.runs = MergedRuns(self.spec.merges, scope.tok, f"{name}, merges")
        return refusals

    def _check_embed_ids(self, config: Any, tok: Vocabulary | None) -> None:
        """Refuse placeholder ids that texts have: prompts with them would be refused, and no model
        could sample them. Without a tokenizer, the config says at which ids an answer ends; an
        output ends after as many ids as it has.

        Raises:
            SpecError: names the modality and the id.
        """
        expected = "a placeholder id that no text has"
        remedy = "Use a special token, or a reserved id: placeholder ids are never sampled."
        (end,) = read_text_config(config, "eos_token_id")
        ends = end if isinstance(end, (list, tuple)) else [end]
        for token, names in self._owners.items():
            how = None
            if tok is not None:
                how = tok.explain_in_texts(token)
            elif token in ends and not self.spec.outputs:
                how = "the config's eos_token_id, with which an answer ends"
            if how is not None:
                where = f"{self.spec.name}.{names[0]}, layout"
                raise SpecError(where, expected, f"{token}, {how}", remedy)

    def _placeholder_texts(self, tok: Vocabulary | None) -> list[str]:
        """The tokens that stand for items in a prompt, placeholders and targets, as texts."""
        if tok is None:
            return []
        ids = {*self.embed_ids, *(target[0] for target in self._reserved if len(target) == 1)}
        return tok.find_texts(ids)

    def _check_literal_ids(self) -> None:
        """Refuse placeholder ids where no item of their modality stands: in a prompt without items
        of that modality, they would be placeholders without an item.

        Raises:
            SpecError: names the part of the spec, and the modality whose placeholder it has.
        """
        for modality in self.modalities.values():
            literals = f"{modality.where}, layout"
            self._check_literals(modality.literal_ids, literals, modality.name)
            for target in modality.layout_evaluator.targets():
                self._check_literals(target, f"{modality.where}, update", modality.name)
                self._check_known(target, f"{modality.where}, update")
            for prefix in modality.layout_evaluator.prefixes():
                self._check_literals(prefix, f"{modality.where}, update")
        if isinstance(end := self._prompts["prompt"], EndingWith):
            for fixed in end.ids.find_fixed_parts():
                self._check_literals(fixed.literal_ids, f"{self.spec.name}.prompt")

    def _check_literals(self, ids: Iterable[int], where: str, name: str = "") -> None:
        """Refuse placeholder ids of others than the modality of that name.

        Raises:
            SpecError: names the first.
        """
        for token in sorted({*ids} & self._owners.keys()):
            names = self._owners[token]
            if name in names:
                continue
            expected = "ids that are no placeholder" + (" of another modality" if name else "")
            got = f"{self._token_text(token)}, the placeholder of {names[0]}"
            remedy = f"Use another token: without items of {names[0]}, such a prompt is refused."
            raise SpecError(where, expected, got, remedy)

    def _check_known(self, target: Target, where: str) -> None:
        """Refuse a target with the token of all words that the tokenizer does not know.

        Raises:
            SpecError: it has that token.
        """
        tok = self._scope.tok
        if tok is None or tok.unknown_id not in target or not tok.encodes_unknown:
            return
        expected = "a target of known tokens"
        got = f"{self._token_text(tok.unknown_id)}, every word that the tokenizer does not know"
        raise SpecError(where, expected, got, "Use a token of its own.")

    def _token_text(self, token: int) -> str:
        """Return a token for messages, as text where there is a tokenizer."""
        tok = self._scope.tok
        return str(token) if tok is None else repr(tok.decode([token]))

    def _reserved_targets(self) -> dict[Target, str]:
        """The targets that can only stand for items, each with its modality.

        Raises:
            SpecError: two modalities share a target, so no rule says which item goes where.
        """
        owners: dict[Target, str] = {}
        reserved: dict[Target, str] = {}
        for modality in self.modalities.values():
            for target, special in modality.layout_evaluator.targets().items():
                if (other := owners.setdefault(target, modality.name)) != modality.name:
                    expected = "a target that no other modality has"
                    spelled = placement.describe_ids(target, self._scope.tok)
                    got = f"{spelled}, which is that of {other} too"
                    remedy = "Give each a token of its own."
                    raise SpecError(f"{modality.where}, update", expected, got, remedy)
                if special:
                    reserved[target] = modality.name
        return reserved

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer, as the spec sees it; None for a model without one."""
        return self._scope.tok  # type: ignore[no-any-return]

    def configured(self, kwargs: Mapping[str, Any], processor: Any) -> Plan:
        """This plan for the `mm_processor_kwargs` of one request. `proc` is the Hugging Face
        processor that these options configure.

        Raises:
            InputError: options with which the spec cannot be bound.
        """
        with report_as_options_error(self._options_where):
            if kwargs == self._scope.kwargs:
                return self
            return self._configured.get(options_key(kwargs), lambda: self._with(kwargs, processor))

    def _with(self, kwargs: Mapping[str, Any], processor: Any) -> Plan:
        cfg, tok = self._scope.cfg, self._scope.tok
        limits = self._max_model_len, self.dtype
        return Plan(self.spec, cfg, tok, processor, kwargs, *limits, base=self)

    @property
    def _options_where(self) -> str:
        return f"{self.spec.name}, mm_processor_kwargs"

    def blamed(self) -> AbstractContextManager[None]:
        """A context in which what fails is the caller's mistake, where this is the plan of a
        request's options: without these, the spec is sound."""
        return nullcontext() if self._base is None else report_as_options_error(self._options_where)

    def rewrite(
        self, part: Part, prompt: list[int], counts: Mapping[str, int] = EMPTY
    ) -> list[int]:
        """A caller's prompt after `prompt` or `decoder_prompt` of the spec; unchanged where the
        spec declares neither. The ids of `ending_with` are not appended twice, for example to a
        prompt that was rewritten before.

        Args:
            part: "prompt" or "decoder_prompt".
            prompt: token ids.
            counts: number of items of the request by modality.

        Raises:
            InputError: an id that the model does not have, or a prompt that the function of the
                spec does not take.
        """
        if (declared := self._prompts[part]) is None:
            return prompt
        where = f"{self.spec.name}.{part}"
        ends = isinstance(declared, EndingWith)
        with convert_errors(where, "a prompt that the spec can rewrite", InputError):
            scope = replace(self._scope, prompt=prompt, counts=counts)
            literal = (declared.ids if ends else declared).lay(scope)
        if literal.num_embeds:
            raise SpecError(where, "literal ids, since placeholders belong to items", "embed()")
        check_spec_ids(literal.ids, self.vocab_size, where)
        if not ends:
            return list(literal.ids)
        has_end = prompt[max(0, len(prompt) - len(literal)) :] == literal.ids
        return prompt if has_end else [*prompt, *literal.ids]

    def process(self, taken: AllTaken) -> dict[str, Processed]:
        """The processed fields of canonical items, by modality; modalities without items are left
        out.

        Raises:
            InputError: None in place of an item; or the Hugging Face processor, or a function of
                the spec, refuses them.
            SpecError: the outputs contradict the declared fields, or there is no processor.
        """
        with self.blamed():
            done = self._process(taken)
            for name, processed in done.items():
                if not taken[name].embeds:
                    self.modalities[name].check_forms(processed)
        return done

    def _process(self, taken: AllTaken) -> dict[str, Processed]:
        done: dict[str, Processed] = {}
        shared: dict[Hashable, dict[HFCall, Taken]] = {}
        for name, own in taken.items():
            if name not in self.modalities:
                expected = f"options with which the model has the modality {name}"
                raise InputError(self._options_where, expected, "others")
            modality = self.modalities[name]
            modality.parser.check_present(own.values, "None, and no such item in the cache")
            processing = modality.field_processor
            if not own.values:
                continue
            if own.embeds:
                done[name] = own.values
            elif own.are_largest and (zeros := processing.zeros(own)):
                done[name] = zeros
            elif (call := processing.hf_call) is None or call.hf.one_by_one:
                done[name] = processing.run(own)
            else:
                shared.setdefault(call.key, {})[call] = own
        for calls in shared.values():
            outputs = next(iter(calls)).outputs(calls)
            for call, own in calls.items():
                done[call.modality.name] = call.modality.field_processor.finish(outputs, own)
        return done

    def preview(self, prompt: Prompt, data: Mapping[str, object], **tokenization: Any) -> Preview:
        """Process a request and place its items, without vLLM.

        Args:
            prompt: a text, or token ids.
            data: as a caller writes it into ``multi_modal_data``.
            tokenization: options of the tokenizer for a text; see `encode`.

        Raises:
            InputError: vLLM's path would refuse the request too.
            SpecError: raw items of a modality that needs the Hugging Face processor, and the plan
                was bound without one.
        """
        taken = self.take(data)
        fields = self.process(taken)
        return Preview(*self._placed(prompt, taken, fields, tokenization), fields)

    def expand(self, prompt: Prompt, data: Mapping[str, object]) -> list[int]:
        """The ids of a prompt with the layouts of its items. Items are processed only where their
        layouts read processed fields.

        Arguments and errors as for `preview`.
        """
        return self._placed(prompt, self.take(data)).token_ids

    def _placed(
        self,
        prompt: Prompt,
        taken: AllTaken,
        fields: AllProcessed = EMPTY,
        tokenization: Mapping[str, Any] = EMPTY,
    ) -> PlacedPrompt:
        ids, items = self.encode(prompt, **tokenization), self._alternatives(taken, fields)
        counts = {name: own.total for name, own in taken.items()}
        return self.place(self.rewrite("prompt", ids, counts), items)

    def unexpand(self, prompt: Sequence[int], data: Mapping[str, object]) -> list[int]:
        """The inverse of `expand`: the ids that a caller writes for an expanded prompt. The ids
        that the first alternative of `update` expects replace each layout, and the ids of
        `ending_with` are left out. `expand` makes the same prompt again. Where it would not, after
        a function of the spec that rewrites prompts, the result is the expanded prompt itself,
        which `expand` leaves as it is.

        Args:
            prompt: token ids, with the layouts of all items.
            data: the items, as for `expand`.

        Raises:
            InputError: the items would be refused, or a layout is not in the prompt.
            SpecError: as for `preview`.
        """
        self.check_ids(prompt)
        ids = list(prompt)
        if self._is_raw:
            return ids
        taken = self.take(data)
        items = self._alternatives(taken)
        try:
            apart, placements = self._apart(ids, items, EMPTY, (PromptForm.EXPANDED,))
        except InputError as error:
            expected, got = "the layout of each item", "a prompt without some of them"
            remedy = "Give what expand() returns, and the same items."
            raise InputError(f"{self.spec.name}.prompt", expected, got, remedy) from error
        written: list[int] = []
        position = 0
        for at in placements:
            first, *_ = items[at.modality][at.index].caller_ids
            written += [*apart[position : at.start], *first]
            position = at.end
        written += apart[position:]
        if items:
            written = self.runs.merge(PlacedPrompt(written, [])).token_ids
        if (declared := self._prompts["prompt"]) is None:
            return written
        end = declared.ids.lay(self._scope).ids if isinstance(declared, EndingWith) else []
        candidates = (written[: len(written) - len(end)], written)
        return next((own for own in candidates if self.expand(own, data) == ids), ids)

    def encode(self, prompt: Prompt, **options: Any) -> list[int]:
        """The ids of a caller's prompt, before anything is placed.

        Args:
            prompt: a text, or token ids.
            options: of the tokenizer; they take precedence over the spec's.

        Raises:
            InputError: an id that the model does not have, or a text for a model without a
                tokenizer.
        """
        written: Any = prompt
        if isinstance(prompt, str):
            if self._scope.tok is None:
                where, expected = f"{self.spec.name}.prompt", "token ids"
                raise InputError(where, expected, "a text", "The model has no tokenizer.")
            options = {**self.spec.tokenization_kwargs, **options}
            written = self._scope.tok.tokenizer.encode(prompt, **options)
        ids: list[int] = list(written)
        self.check_ids(ids)
        return ids

    def take(self, data: Mapping[str, object]) -> dict[str, Taken]:
        """The items that a caller sends, by modality; modalities without items are left out.

        Raises:
            InputError: they are malformed, or more than the spec's limit.
        """
        if not isinstance(data, Mapping):
            expected, got = "a dict of items by modality", f"a {type(data).__name__}"
            remedy = f'Write {{"{next(iter(self.modalities))}": [...]}}.'
            raise InputError(f"{self.spec.name}.multi_modal_data", expected, got, remedy)
        self.check_names(data)
        taken: dict[str, Taken] = {}
        for name, sent in data.items():
            modality = self.modalities[name]
            own = modality.parser.parse(sent, self.hidden_size)
            modality.parser.check_present(own.values, "None")
            modality.parser.check_count(own.total, modality.limit)
            if own.values:
                taken[name] = own
        return taken

    def _alternatives(self, taken: AllTaken, fields: AllProcessed = EMPTY) -> LayoutsByModality:
        """The alternatives of each item, by modality. Without their fields, items are processed as
        far as their layouts need it."""
        with self.blamed():
            return {
                name: [*modality.layouts(own, fields.get(name))]
                for name, modality in self.modalities.items()
                if (own := taken.get(name))
            }

    def spell(self, data: Mapping[str, object]) -> list[int]:
        """The ids that a caller writes for items, modality by modality: targets where the update
        replaces them, whole layouts where the caller writes these, nothing where mmkit inserts
        them.

        Args:
            data: as a caller writes it into ``multi_modal_data``.

        Raises:
            InputError: the items would be refused.
            SpecError: as for `preview`.
        """
        return [token for _, written in self._written(self.take(data)) for token in written]

    def shortest_prompt(self, taken: AllTaken) -> list[int]:
        """The shortest prompt that takes some items: what `spell` writes for them, behind the
        prefix after which mmkit inserts some, unless `prompt` of the spec writes it.

        Errors as for `spell`.
        """
        known = self._written(taken)
        ids = [token for _, written in known for token in written]
        prefix = next((target for target, written in known if target and not written), ())
        if prefix and tuple(self.rewrite("prompt", [])[: len(prefix)]) != prefix:
            ids = [*prefix, *ids]
        return ids

    def _written(self, taken: AllTaken) -> list[tuple[Target, Target]]:
        """The target of each item, and the ids that a caller writes for it."""
        return [pair for name, own in taken.items() for pair in self.modalities[name].written(own)]

    def check_ids(self, prompt: Sequence[Any]) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            InputError: an id that is no whole number, or lies outside the vocabulary.
        """
        try:
            msgspec.convert(prompt, self._ids)  # one pass in C
        except msgspec.ValidationError:
            for position, token in enumerate(prompt):
                if type(token) is not int or not 0 <= token < self.vocab_size:
                    where = f"{self.spec.name}.prompt[{position}]"
                    expected = f"a token id from 0 to {self.vocab_size - 1}"
                    remedy = "Check the tokenizer."
                    raise InputError(where, expected, describe_id(token), remedy) from None
            raise

    def check_names(self, data: Iterable[str]) -> None:
        """Refuse data of modalities that the model does not have.

        Raises:
            InputError: names the first of them.
        """
        for name in data:
            if name in self.modalities:
                continue
            remedy, expected = "", f"modalities among {sorted(self.modalities)}"
            if known := self.modalities.get(base := name.removesuffix("_embeds")):
                remedy = f'Send embeddings as {{"{base}": {{"{base}_embeds": ...}}}}.'
                if not known.parser.takes_embeds:
                    remedy = f"Send the raw items of {base}: the spec takes no embeddings of them."
            where = f"{self.spec.name}.multi_modal_data"
            raise InputError(where, expected, repr(name), remedy)

    def check_bare(self, prompt: Sequence[int], present: Collection[str] = ()) -> None:
        """Refuse placeholder ids of modalities that have no items in the request. In a request
        without any items, refuse targets that can only stand for items too: beside items, `place`
        looks for leftover targets. A model of raw input needs an item in every request.

        Args:
            prompt: token ids.
            present: modalities with at least one item.

        Raises:
            InputError: names the modality and how many placeholder ids there are.
        """
        bare = {t for t, names in self._owners.items() if not any(n in present for n in names)}
        if not bare.isdisjoint(prompt):
            token = min(bare.intersection(prompt))
            name = self._owners[token][0]
            number = list(prompt).count(token)
            spelled = placement.describe_ids([token], self._scope.tok)
            got = f"{number} placeholder{'' if number == 1 else 's'} {spelled} and no item"
            remedy = f'Send items of "{name}", or leave the placeholders out.'
            raise InputError(self.modalities[name].where, "one item per placeholder", got, remedy)
        if self._is_raw and (missing := set(self.modalities).difference(present)):
            expected, remedy = "one item per request", "The model reads nothing else."
            raise InputError(f"{self.spec.name}.{min(missing)}", expected, "none", remedy)
        if not present:
            ids, tok = [*prompt], self._scope.tok
            texts = text_targets.find_text_targets(EMPTY, self._reserved)
            if texts and tok is not None:
                ids = text_targets.restore_text_targets(ids, texts, tok)
            placement.place(ids, {}, self.spec.name, self._reserved, (PromptForm.UNEXPANDED,), tok)

    def place(self, prompt: list[int], items: LayoutsByModality) -> PlacedPrompt:
        """Bring the layouts of all items into a prompt; see `mmkit.plan.placement`.

        Where targets of several modalities match at the same place, or anchors are equal, the order
        of the spec decides.
        """
        present = {name: items[name] for name in self.modalities if items.get(name)}
        self.check_bare(prompt, present)
        if not present:
            return PlacedPrompt(list(prompt), [])
        reserved, tok = self._reserved, self._scope.tok
        texts = text_targets.find_text_targets(present, reserved)
        if texts and tok is not None:
            try:
                # before anything is written anew: a layout may hold the text of a target
                return self.runs.merge(
                    self._apart(prompt, present, reserved, (PromptForm.EXPANDED,))
                )
            except InputError:
                prompt = text_targets.restore_text_targets(prompt, texts, tok)
        return self.runs.merge(self._apart(prompt, present, reserved))

    def _apart(
        self,
        prompt: list[int],
        items: LayoutsByModality,
        reserved: Mapping[Target, str],
        forms: Sequence[PromptForm] = tuple(PromptForm),
    ) -> PlacedPrompt:
        """`mmkit.plan.placement.place`, with the tokens that merge taken apart."""
        if items and self.runs.tokens_by_length:
            prompt = self.runs.split(prompt)
            items = self.runs.split_layouts(items)
        tok = self._scope.tok
        return placement.place(prompt, items, self.spec.name, reserved, forms, tok)


def hidden_size(config: Any) -> int | None:
    """Width of the language model's rows by a Hugging Face config, computed as in vLLM; None if
    the config does not state it."""
    sizes = read_text_config(config, "projection_dim", "projection_size", "hidden_size")
    return next((size for size in sizes if isinstance(size, int)), None)
