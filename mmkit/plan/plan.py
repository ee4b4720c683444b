"""A spec bound to one config and tokenizer: the compiled form that requests run through.

`mmkit.plan.bind.bind` makes a plan: it evaluates once everything that depends only on the config
and the vocabulary. A plan evaluates layouts once per item geometry, and caches them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import torch

from ..errors import InputError, SpecError, convert_errors, report_as_options_error
from ..language.items import select_options
from ..language.items.values import check_unicode
from ..language.layout import EndingWith, Target
from ..language.node import dependencies
from ..language.spec import Declaration
from ..language.vocabulary import Vocabulary, check_spec_ids, describe_id, read_text_config
from . import outline, placing
from .guard import PlaceholderGuard
from .hashes import ItemHasher
from .hf_calls import HFCall, LazyProcessor, call_together
from .item import Item, group_by_modality, make_batch, make_items
from .memo import Memo
from .merging import MergedRuns
from .modality import BoundModality, CallerIds, Environment
from .output import BoundOutput
from .parsing import ItemBatch
from .placement import (
    NO_TARGETS,
    ItemLayout,
    LayoutsByModality,
    PlacedPrompt,
    Placement,
    PromptForm,
    ReservedTargets,
)
from .policy import BoundPolicy
from .processing import ProcessedFields
from .text_targets import TextTarget, TextTargets

EMPTY: Mapping[Any, Any] = MappingProxyType({})

Part: TypeAlias = Literal["prompt", "decoder_prompt"]
"""What a spec may rewrite."""

Prompt: TypeAlias = "str | Sequence[int]"
"""A text, or token ids."""

BatchesByModality: TypeAlias = Mapping[str, ItemBatch]
"""The items of a request, by modality."""


_NO_CONTEXT = nullcontext()


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
    fields: dict[str, ProcessedFields]


@dataclass(frozen=True, eq=False)
class Plan:
    """A spec bound to one config and tokenizer; make it with `ModelSpec.bind`.

    vLLM's and SGLang's processors call three methods with the `Item`s of a request:

    - `fill_in_fields` puts into each item what `compute_fields` returns, which checks the forms of
      the fields. `_call_processors` makes them, by `FieldProcessor.run` for each modality, or by
      one call of a Hugging Face processor for several.
    - `fill_in_layouts` evaluates the layout of each item (`BoundModality.lay_out`).
    - `rewrite_and_place` rewrites the prompt (`rewrite`) and calls `place_layouts`, which refuses
      placeholders without an item and writes targets anew that lie across tokens.
      `_split_runs_and_place` splits tokens that merge, and calls `mmkit.plan.placing.place`, which
      searches and writes.

    Attributes:
        spec: the declaration.
        environment: what it is bound to.
        modalities: the bound modalities, by name.
        prompts: the bound `prompt` and `decoder_prompt`.
        reserved_targets: the targets that can only stand for items.
        runs: the tokens that merge where a layout meets its prompt.
        guard: the placeholder ids, against which prompts and samples are guarded.
        outputs: the bound outputs, by name.
        policy: how a robot drives the model; None for a spec without one.
        plans_for_options: caches the plans for distinct `mm_processor_kwargs`.
        make_for_options: returns the plan for others; see `mmkit.plan.bind.plan_for_options`.
    """

    spec: Declaration
    environment: Environment
    modalities: dict[str, BoundModality]
    prompts: Mapping[Part, Any]
    reserved_targets: ReservedTargets
    runs: MergedRuns
    guard: PlaceholderGuard
    outputs: Mapping[str, BoundOutput]
    policy: BoundPolicy | None
    plans_for_options: Memo
    make_for_options: Callable[[Plan, Mapping[str, Any], Any], Plan]

    @property
    def vocab_size(self) -> int:
        """Number of ids of the language model."""
        return self.environment.vocab_size

    @cached_property
    def hidden_size(self) -> int | None:
        """Width of the language model's rows; None where the config does not tell."""
        return find_hidden_size(self.environment.scope.cfg)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the language model; None where the plan was bound without vLLM."""
        return self.environment.dtype

    @cached_property
    def embed_ids(self) -> frozenset[int]:
        """The placeholder ids."""
        return self.guard.ids

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer, as the spec sees it; None for a model without one."""
        return self.environment.scope.tok  # type: ignore[no-any-return]

    @property
    def options_where(self) -> str:
        """Names the options of a request in errors."""
        return f"{self.spec.name}, mm_processor_kwargs"

    # -- a request, without vLLM -------------------------------------------------------------------

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
        items = self.parse_items(data)
        self.fill_in_fields(items)
        self.fill_in_layouts(items)
        placed = self.rewrite_and_place(self.encode(prompt, **tokenization), items)
        fields: dict[str, ProcessedFields] = {}
        for name, items_of_modality in group_by_modality(items).items():
            fields[name] = [item.fields for item in items_of_modality]
        return Preview(placed.token_ids, placed.placements, fields)

    def outline(
        self,
        prompt: Prompt,
        data: Mapping[str, object],
        *,
        options: Mapping[str, Any] = EMPTY,
        uuids: Mapping[str, Sequence[str | None]] = EMPTY,
        cache_salt: str | None = None,
        hasher: ItemHasher | None = None,
    ) -> outline.Outline:
        """Return what follows of a request from the facts of its items alone.

        Ids, placements and rows are the same as on vLLM's path. No item is processed.

        Args:
            prompt: a text, or token ids.
            data: by modality, the facts of items (`ImageFacts`, an `ImageFile`), or items as a
                caller writes them into ``multi_modal_data``.
            options: the request's `mm_processor_kwargs`. A plan whose spec reads the processor has
                to be bound with a `LazyProcessor` then.
            uuids: the request's `multi_modal_uuids`.
            cache_salt: the request's `cache_salt`, which concerns uuids only.
            hasher: makes the keys of items with content or a uuid; None leaves them out.

        Raises:
            InputError: vLLM's path would refuse the request too.
            NeedsProcessing: the layout of a modality reads what only processing tells.
        """
        items = self.parse_facts(data, uuids, cache_salt)
        plan = self
        if options:
            plan = self._find_plan_for_options(options)
        rows: dict[str, list[int]] = {}
        hashes: dict[str, list[str | None]] = {}
        fields: dict[str, ProcessedFields] = {}
        uncomputed_fields: dict[str, list[str]] = {}
        for name, items_of_modality in group_by_modality(items).items():
            modality = plan._find_modality(name)
            outline.check_reads(items_of_modality, modality)
            with plan.blame_options():
                outline.lay_out(items_of_modality, modality, may_be_larger=bool(options))
            hash_options: dict[str, Any] = {}
            if options:
                selected = select_options(self.modalities[name].item, options)
                hash_options = {"mm_processor_kwargs": selected}
            hashes[name] = outline.hash_items(items_of_modality, modality, hasher, hash_options)
            rows[name] = [item.layout.tokens.num_embeds for item in items_of_modality]
            fields[name] = outline.select_fields(items_of_modality, modality)
            uncomputed_fields[name] = outline.list_uncomputed_fields(items_of_modality, modality)
        placed = self.rewrite_and_place(self.encode(prompt), items)
        return outline.Outline(
            placed.token_ids, placed.placements, rows, hashes, fields, uncomputed_fields
        )

    def expand(self, prompt: Prompt, data: Mapping[str, object]) -> list[int]:
        """Return the ids of a prompt with the layouts of its items.

        Items are processed only where their layouts read processed fields. Arguments and errors as
        for `preview`.
        """
        items = self.parse_items(data)
        self._process_for_layouts(items)
        self.fill_in_layouts(items)
        return self.rewrite_and_place(self.encode(prompt), items).token_ids

    def unexpand(self, prompt: Sequence[int], data: Mapping[str, object]) -> list[int]:
        """Return the ids that a caller writes for an expanded prompt, the inverse of `expand`.

        The ids that the first alternative of `update` expects replace each layout, and the ids of
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
        expanded = list(prompt)
        if self.spec.is_raw:
            return expanded
        items = self.parse_items(data)
        self._process_for_layouts(items)
        self.fill_in_layouts(items)
        caller_ids = self._remove_layouts(expanded, self._group_layouts(items))
        declared = self.prompts["prompt"]
        if declared is None:
            return caller_ids
        candidates = [caller_ids]
        if isinstance(declared, EndingWith):
            end = declared.ids.lay(self.environment.scope).ids
            candidates.insert(0, caller_ids[: len(caller_ids) - len(end)])
        for candidate in candidates:
            if self.expand(candidate, data) == expanded:
                return candidate
        return expanded

    def _remove_layouts(self, expanded: list[int], layouts: LayoutsByModality) -> list[int]:
        """Return an expanded prompt with the ids that a caller writes in place of each layout.

        Raises:
            InputError: a layout is not in the prompt.
        """
        try:
            placed = self._split_runs_and_place(
                expanded, layouts, NO_TARGETS, (PromptForm.EXPANDED,)
            )
        except InputError as error:
            expected, got = "the layout of each item", "a prompt without some of them"
            remedy = "Give what expand() returns, and the same items."
            raise InputError(f"{self.spec.name}.prompt", expected, got, remedy) from error
        caller_ids: list[int] = []
        position = 0
        for placement in placed.placements:
            layout = layouts[placement.modality][placement.index]
            caller_ids += placed.token_ids[position : placement.start]
            caller_ids += layout.caller_ids[0]
            position = placement.end
        caller_ids += placed.token_ids[position:]
        if layouts:
            return self.runs.merge(PlacedPrompt(caller_ids, [])).token_ids
        return caller_ids

    def spell(self, data: Mapping[str, object]) -> list[int]:
        """Return the ids that a caller writes for items, modality by modality.

        These are targets where the update replaces them, whole layouts where the caller writes
        layouts, and nothing where mmkit inserts the layouts.

        Args:
            data: as a caller writes it into ``multi_modal_data``.

        Raises:
            InputError: the items would be refused.
            SpecError: as for `preview`.
        """
        ids: list[int] = []
        for caller_ids in self._list_caller_ids(self.parse_items(data)):
            ids += caller_ids.ids
        return ids

    # -- the steps of a request --------------------------------------------------------------------

    def parse_items(self, data: Mapping[str, object]) -> list[Item]:
        """Return the items that a caller sends, modality by modality.

        Raises:
            InputError: they are malformed, or more than the spec's limit.
        """
        self._check_data(data)
        items: list[Item] = []
        for name, data_of_modality in data.items():
            modality = self.modalities[name]
            batch = modality.parser.parse(data_of_modality, self.hidden_size)
            modality.parser.check_present(batch, "None")
            modality.parser.check_count(batch.total, modality.limit)
            items += make_items(name, batch)
        return items

    def parse_facts(
        self,
        data: Mapping[str, object],
        uuids: Mapping[str, Sequence[str | None]] = EMPTY,
        cache_salt: str | None = None,
    ) -> list[Item]:
        """Return the items of a request of which only facts may be known; see `outline`.

        Raises:
            InputError: items or facts that vLLM's path would refuse, or other uuids than items.
        """
        self._check_data(data)
        items: list[Item] = []
        for name, data_of_modality in data.items():
            modality = self.modalities[name]
            parsed = outline.parse_modality(modality, data_of_modality, self.hidden_size)
            if uuids.get(name) is not None:
                outline.name_items(modality, parsed, uuids[name], cache_salt)
            items += parsed
        return items

    def compute_fields(self, batches: BatchesByModality) -> dict[str, ProcessedFields]:
        """Return the processed fields of canonical items, by modality.

        Modalities without items are left out.

        Raises:
            InputError: None in place of an item; or the Hugging Face processor, or a function of
                the spec, refuses them.
            SpecError: the outputs contradict the declared fields, or there is no processor.
        """
        with self.blame_options():
            fields = self._call_processors(batches)
            for name, processed in fields.items():
                if not batches[name].are_embeddings:
                    self.modalities[name].check_forms(processed, batches[name].indices)
        return fields

    def fill_in_fields(self, items: Sequence[Item]) -> None:
        """Fill in the processed fields of items of a request.

        Errors as for `process`.
        """
        groups = group_by_modality(items)
        fields = self.compute_fields({name: make_batch(group) for name, group in groups.items()})
        for name, items_of_modality in groups.items():
            for item, fields_of_item in zip(items_of_modality, fields[name], strict=True):
                item.fields = fields_of_item

    def fill_in_layouts(self, items: Sequence[Item], *, may_be_larger: bool = False) -> None:
        """Fill in the layouts of items of a request.

        Args:
            items: the items, with their processed fields as far as layouts read them.
            may_be_larger: whether they may have more encoder rows than the largest item.

        Raises:
            InputError: see `BoundModality.lay_out`.
        """
        with self.blame_options():
            for item in items:
                modality = self.modalities[item.modality]
                item.layout = modality.lay_out(item, may_be_larger=may_be_larger)

    def rewrite_and_place(self, prompt: list[int], items: Sequence[Item]) -> PlacedPrompt:
        """Rewrite a caller's prompt, and bring the layouts of its items into it.

        Args:
            prompt: token ids.
            items: all items of the request, with their layouts.

        Raises:
            InputError: see `rewrite` and `place_layouts`.
        """
        counts = {item.modality: item.count for item in items}
        rewritten = self.rewrite("prompt", prompt, counts)
        return self.place_layouts(rewritten, self._group_layouts(items))

    def place_layouts(self, prompt: list[int], layouts: LayoutsByModality) -> PlacedPrompt:
        """Bring the layouts of all items into a prompt; see `mmkit.plan.placing`.

        Where targets of several modalities match at the same position, or anchors are equal, the
        order of the spec decides.
        """
        present = {name: layouts[name] for name in self.modalities if layouts.get(name)}
        self.check_bare(prompt, present)
        if not present:
            return PlacedPrompt(list(prompt), [])
        targets: Sequence[TextTarget] = ()
        if self._text_targets is not None:
            targets = self._text_targets.find(present)
        if not targets:  # nearly always
            placed = self._split_runs_and_place(prompt, present, self.reserved_targets)
        else:
            placed = self._place_among_texts(prompt, present, targets)
        return self.runs.merge(placed)

    def blame_options(self) -> AbstractContextManager[None]:
        """Return a context that reports errors as mistakes in the options of a request.

        It does so only in a plan for options: without them, the spec is sound.
        """
        if not self.guard.is_for_options:
            return _NO_CONTEXT
        return report_as_options_error(self.options_where)

    def shortest_prompt(self, items: Sequence[Item]) -> list[int]:
        """Return the shortest prompt for items.

        It is what `spell` writes for them, after the prefix behind which mmkit inserts layouts,
        unless `prompt` of the spec writes that prefix. Errors as for `spell`.
        """
        ids: list[int] = []
        prefix: Target = ()
        for caller_ids in self._list_caller_ids(items):
            ids += caller_ids.ids
            if caller_ids.target and not caller_ids.ids and not prefix:
                prefix = caller_ids.target
        if prefix and tuple(self.rewrite("prompt", [])[: len(prefix)]) != prefix:
            return list(prefix) + ids
        return ids

    # -- prompts -----------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, **options: Any) -> list[int]:
        """Return the ids of a caller's prompt, before anything is placed.

        Args:
            prompt: a text, or token ids.
            options: of the tokenizer; they take precedence over the spec's.

        Raises:
            InputError: an id that the model does not have, a text that UTF-8 cannot encode, or a
                text for a model without a tokenizer.
        """
        tokens: Any = prompt
        if isinstance(prompt, str):
            if self.vocabulary is None:
                where, expected = f"{self.spec.name}.prompt", "token ids"
                raise InputError(where, expected, "a text", "The model has no tokenizer.")
            check_unicode(prompt, f"{self.spec.name}.prompt")
            options = {**self.spec.tokenization_kwargs, **options}
            tokens = self.vocabulary.tokenizer.encode(prompt, **options)
        ids: list[int] = list(tokens)
        self.check_ids(ids)
        return ids

    def rewrite(
        self, part: Part, prompt: list[int], counts: Mapping[str, int] = EMPTY
    ) -> list[int]:
        """Return a caller's prompt as `prompt` or `decoder_prompt` of the spec rewrites it.

        It is unchanged where the spec does not declare that part. The ids of `ending_with` are not
        appended twice, for example to a prompt that was rewritten before.

        Args:
            part: "prompt" or "decoder_prompt".
            prompt: token ids.
            counts: number of items of the request by modality.

        Raises:
            InputError: an id that the model does not have, or a prompt that the function of the
                spec does not take.
        """
        declared = self.prompts[part]
        if declared is None:
            return prompt
        where = f"{self.spec.name}.{part}"
        is_ending = isinstance(declared, EndingWith)
        layout = declared.ids if is_ending else declared
        with convert_errors(where, "a prompt that the spec can rewrite", InputError):
            tokens = layout.lay(self.environment.scope.for_prompt(prompt, counts))
        if tokens.num_embeds:
            raise SpecError(where, "literal ids, since placeholders belong to items", "embed()")
        check_spec_ids(tokens.ids, self.vocab_size, where)
        if not is_ending:
            return list(tokens.ids)
        if prompt[max(0, len(prompt) - len(tokens)) :] == tokens.ids:
            return prompt
        return prompt + list(tokens.ids)

    # -- checks ------------------------------------------------------------------------------------

    def check_ids(self, prompt: Sequence[Any]) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            InputError: an id that is no whole number, or lies outside the vocabulary.
        """
        try:
            msgspec.convert([prompt], self._type_of_prompts)  # one pass in C
        except msgspec.ValidationError:
            for position, token in enumerate(prompt):
                if type(token) is not int or not 0 <= token < self.vocab_size:
                    where = f"{self.spec.name}.prompt[{position}]"
                    expected = f"a token id from 0 to {self.vocab_size - 1}"
                    remedy = "Check the tokenizer."
                    raise InputError(where, expected, describe_id(token), remedy) from None
            raise

    def _check_data(self, data: object) -> None:
        """Refuse what is no dict of items by modality, and modalities that the model lacks."""
        if not isinstance(data, Mapping):
            expected, got = "a dict of items by modality", f"a {type(data).__name__}"
            remedy = f'Write {{"{next(iter(self.modalities))}": [...]}}.'
            raise InputError(f"{self.spec.name}.multi_modal_data", expected, got, remedy)
        self.check_names(data)

    def check_names(self, data: Iterable[str]) -> None:
        """Refuse data of modalities that the model does not have.

        Raises:
            InputError: names the first of them.
        """
        for name in data:
            if name not in self.modalities:
                where = f"{self.spec.name}.multi_modal_data"
                expected = f"modalities among {sorted(self.modalities)}"
                raise InputError(where, expected, repr(name), self._remedy_for_name(name))

    def _remedy_for_name(self, name: str) -> str:
        """Return what to do about a name that is no modality: it may name a field."""
        modality_name = name.removesuffix("_embeds")
        modality = self.modalities.get(modality_name)
        if modality is None:
            return ""
        if not modality.parser.takes_embeds:
            return f"Send the raw items of {modality_name}: the spec takes no embeddings of them."
        return f'Send embeddings as {{"{modality_name}": {{"{modality_name}_embeds": ...}}}}.'

    def check_bare(self, prompt: Sequence[int], present: Collection[str] = ()) -> None:
        """Refuse placeholder ids of modalities that have no items in the request.

        In a request without any items, refuse targets that can only stand for items too: beside
        items, `place` looks for leftover targets. A model of raw input needs an item in every
        request.

        Args:
            prompt: token ids.
            present: modalities with at least one item.

        Raises:
            InputError: names the modality and how many placeholder ids there are.
        """
        self.guard.check_bare(prompt, present)
        if self._is_raw:
            missing_names = set(self.modalities).difference(present)
            if missing_names:
                where = f"{self.spec.name}.{min(missing_names)}"
                remedy = "The model reads nothing else."
                raise InputError(where, "one item per request", "none", remedy)
        if not present:
            self._check_targets_without_items(list(prompt))

    def _check_targets_without_items(self, ids: list[int]) -> None:
        if self._text_targets is not None:
            targets = self._text_targets.find(EMPTY)
            if targets:
                ids = self._text_targets.restore(ids, targets)
        placing.place(
            ids,
            {},
            self.spec.name,
            self.reserved_targets,
            (PromptForm.UNEXPANDED,),
            self.vocabulary,
        )

    # -- machinery ---------------------------------------------------------------------------------

    @cached_property
    def _type_of_prompts(self) -> Any:
        """A struct of a prompt: msgspec reads other types anew at each call."""
        token_id = Annotated[int, msgspec.Meta(ge=0, lt=self.vocab_size)]
        return msgspec.defstruct("Prompt", [("ids", list[token_id])], array_like=True)

    @cached_property
    def _is_raw(self) -> bool:
        """`spec.is_raw`, which asks each modality."""
        return self.spec.is_raw

    @cached_property
    def _text_targets(self) -> TextTargets | None:
        """The targets that are texts of several tokens; None for a model without a tokenizer."""
        if self.vocabulary is None:
            return None
        return TextTargets(self.reserved_targets.modality_of, self.vocabulary)

    def _call_processors(self, batches: BatchesByModality) -> dict[str, ProcessedFields]:
        fields: dict[str, ProcessedFields] = {}
        # by `HFCall.key`: modalities whose calls have equal keys share one call
        names_by_call: dict[Hashable, dict[HFCall, str]] = {}
        for name, batch in batches.items():
            modality = self._find_modality(name)
            modality.parser.check_present(batch, "None, and no such item in the cache")
            if not batch.values:
                continue
            call = modality.field_processor.hf_call
            zeros = None
            if batch.are_largest and not batch.are_embeddings:
                zeros = modality.make_zeros(batch)
            if batch.are_embeddings:
                fields[name] = batch.values
            elif zeros is not None:
                fields[name] = zeros
            elif call is None or call.hf.one_by_one:
                fields[name] = modality.field_processor.run(batch)
            else:
                names_by_call.setdefault(call.key, {})[call] = name
        for names in names_by_call.values():
            outputs = call_together({call: batches[name] for call, name in names.items()})
            for name in names.values():
                field_processor = self.modalities[name].field_processor
                fields[name] = field_processor.finish(outputs, batches[name])
        return fields

    def _find_plan_for_options(self, options: Mapping[str, Any]) -> Plan:
        """Return the plan for the `mm_processor_kwargs` of a request.

        Raises:
            OptionsError: options with which the spec cannot be bound.
            SpecError: the options may change the processor that the spec reads, and the plan was
                bound with a processor that cannot be loaded with them.
        """
        scope = self.environment.scope
        processor = scope.proc
        if isinstance(processor, LazyProcessor):
            processor = processor.with_options(options)
        elif processor is not None and self._reads_processor:
            expected = "a processor that is loaded with the options of a request"
            got = f"a {type(processor).__name__} that is loaded already"
            remedy = "Bind the spec with processor=LazyProcessor(load)."
            raise SpecError(self.options_where, expected, got, remedy)
        return self.make_for_options(self, {**scope.kwargs, **options}, processor)

    @cached_property
    def _reads_processor(self) -> bool:
        """Whether what items become in the prompt may depend on the Hugging Face processor."""
        for modality in self.spec.modalities:
            fields = list(modality.fields.values())
            parts = (modality.item, modality.layout, modality.update, fields)
            roots = {dependency.root for dependency in dependencies(parts)}
            if not roots.isdisjoint(("proc", "function")):
                return True
        return False

    def _find_modality(self, name: str) -> BoundModality:
        """Return a modality.

        Raises:
            InputError: the options of the request take it from the model.
        """
        if name not in self.modalities:
            expected = f"options with which the model has the modality {name}"
            raise InputError(self.options_where, expected, "others")
        return self.modalities[name]

    def _process_for_layouts(self, items: Sequence[Item]) -> None:
        """Fill in the processed fields of items as far as their layouts read them."""
        with self.blame_options():
            for name, items_of_modality in group_by_modality(items).items():
                self.modalities[name].process_for_layouts(items_of_modality)

    def _list_caller_ids(self, items: Sequence[Item]) -> list[CallerIds]:
        """Return the target of each item, and the ids that a caller writes for it."""
        caller_ids: list[CallerIds] = []
        for name, items_of_modality in group_by_modality(items).items():
            caller_ids += self.modalities[name].list_caller_ids(items_of_modality)
        return caller_ids

    def _group_layouts(self, items: Sequence[Item]) -> dict[str, list[ItemLayout]]:
        """Return the layouts of items, by modality."""
        layouts: dict[str, list[ItemLayout]] = {}
        for item in items:
            # a cache may have filled in the layout that the item had at another position
            layout = item.layout.for_index(item.index)
            layouts.setdefault(item.modality, []).append(layout)
        return layouts

    def _place_among_texts(
        self, prompt: list[int], layouts: LayoutsByModality, targets: Sequence[TextTarget]
    ) -> PlacedPrompt:
        """Place layouts in a prompt in which targets that are texts may lie across tokens.

        A prompt that has all layouts already is placed as it is: a layout may hold the text of a
        target, which must stay. So the other targets get their ids only after that was tried. Those
        of items that become ids only get them before, since these targets tell whether the prompt
        has the layouts; no layout of such an item holds its target.

        Args:
            prompt: token ids.
            layouts: per modality and item, the layout.
            targets: the targets of several tokens.
        """
        assert self._text_targets is not None
        layouts_of_ids: dict[str, Sequence[ItemLayout]] = {}
        for name, item_layouts in layouts.items():
            if self.modalities[name].is_ids_only:
                layouts_of_ids[name] = item_layouts
        targets_of_ids = self._text_targets.find_in_layouts(layouts_of_ids)
        if targets_of_ids:
            prompt = self._text_targets.restore(prompt, targets_of_ids)
        placed = self._place_if_expanded(prompt, layouts)
        if placed is not None:
            return placed
        prompt = self._text_targets.restore(prompt, targets)
        return self._split_runs_and_place(prompt, layouts, self.reserved_targets)

    def _place_if_expanded(
        self, prompt: list[int], layouts: LayoutsByModality
    ) -> PlacedPrompt | None:
        """Place layouts in a prompt that has all of them already; None for any other prompt."""
        prompt, layouts = self._split_runs(prompt, layouts)
        if not placing.may_be_expanded(prompt, layouts):  # nearly always
            return None
        try:
            return placing.place(
                prompt, layouts, self.spec.name, self.reserved_targets, (PromptForm.EXPANDED,)
            )
        except InputError:
            return None

    def _split_runs_and_place(
        self,
        prompt: list[int],
        layouts: LayoutsByModality,
        reserved: ReservedTargets,
        forms: Sequence[PromptForm] = tuple(PromptForm),
    ) -> PlacedPrompt:
        """Place layouts in a prompt after the tokens that merge are split.

        For arguments and errors, see `mmkit.plan.placing.place`.
        """
        prompt, layouts = self._split_runs(prompt, layouts)
        return placing.place(prompt, layouts, self.spec.name, reserved, forms, self.vocabulary)

    def _split_runs(
        self, prompt: list[int], layouts: LayoutsByModality
    ) -> tuple[list[int], LayoutsByModality]:
        """Return a prompt and layouts after the tokens that merge are split."""
        if not layouts or not self.runs.tokens_by_length:
            return prompt, layouts
        return self.runs.split(prompt), self.runs.split_layouts(layouts)


def find_hidden_size(config: Any) -> int | None:
    """Return the width of the language model's rows by a Hugging Face config, computed as in vLLM.

    None if the config does not state it.
    """
    for size in read_text_config(config, "projection_dim", "projection_size", "hidden_size"):
        if isinstance(size, int):
            return size
    return None
