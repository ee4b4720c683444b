"""Admission, the last check of every request before the engine, whatever its route.

The routes are the offline API, chat, completions, and tokens in. vLLM compares token ids with the
tokenizer, and skips this for a model without one. Its token-in endpoint accepts processed fields
unchecked. One id of 2**31, or one field that the model does not expect, ends the engine. Embeddings
in place of a prompt's tokens (``--enable-prompt-embeds``) reach the KV cache as they are, past the
encoder and its checks: one NaN makes later answers to others wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from ..plan.encoder_rows import row_count_field
from ..plan.plan import Plan
from ..plan.soundness import check_rows
from .confinement import check_requested_output
from .errors import Refused
from .items import CheckedKwargsItems

TRUST = "trust_processed_fields"
"""The key of vLLM's ``additional_config`` by which a server accepts processed fields of other
hosts."""

PROMPT_EMBEDS = "prompt_embeds"
"""The name under which vLLM carries embeddings of parts of a message, as if of a modality."""


def admit(
    plan: Plan,
    prompt: Mapping[str, Any],
    params: Any = None,
    config: Any = None,
    *,
    trusts: bool,
) -> None:
    """Refuse a rendered request that the engine must not receive.

    Args:
        plan: the plan of the model.
        prompt: vLLM's input for its engine.
        params: vLLM's parameters of the request.
        config: vLLM's configuration of the engine.
        trusts: whether processed fields of other hosts are accepted.

    Raises:
        Refused: the engine must not receive it.
    """
    try:
        _check_params(plan, params)
        check_requested_output(plan, params, config)
        _check_prompts(plan, prompt, trusts)
    except InputError as error:
        raise Refused(error) from None


def _check_params(plan: Plan, params: Any) -> None:
    """Refuse parameters that let placeholders be sampled."""
    allowed_ids = getattr(params, "allowed_token_ids", None)
    if allowed_ids and plan.embed_ids.issuperset(allowed_ids):
        where = f"{plan.spec.name}.allowed_token_ids"
        expected = "an id that is not a placeholder"
        remedy = "Placeholder ids are never sampled."
        raise InputError(where, expected, repr(list(allowed_ids)), remedy)


def _check_prompts(plan: Plan, prompt: Mapping[str, Any], trusts: bool) -> None:
    """Check the prompt of a request, or both parts of the prompt of an encoder-decoder model."""
    parts: list[Mapping[str, Any]] = []
    for name in ("encoder_prompt", "decoder_prompt"):
        if isinstance(prompt.get(name), Mapping):
            parts.append(prompt[name])
    # fields are trusted only where their ranges can be compared with the ids of the same prompt
    is_trusted = trusts and not parts
    for part in parts:
        _check_prompt(plan, part, is_trusted)
    _check_prompt(plan, prompt, is_trusted)
    if parts and all(part.get("type") == "token" for part in parts):
        # vLLM then runs no encoder, the decoder reads memory that nobody has written, and later
        # answers of others are wrong, too
        where = f"{plan.spec.name}.multi_modal_data"
        raise InputError(where, "at least one item", "none", "The encoder reads nothing else.")


def _check_prompt(plan: Plan, prompt: Mapping[str, Any], is_trusted: bool) -> None:
    _check_prompt_embeds(plan, prompt)
    ids = _find_embedded_ids(prompt)
    is_multimodal = prompt.get("type") == "multimodal"
    if ids is not None:
        plan.check_ids(ids)
        # placeholders of an encoder-decoder model stand in the encoder's prompt, apart from their
        # items
        has_items = is_multimodal or prompt.get("multi_modal_data")
        if not has_items and plan.spec.decoder_prompt is None:
            plan.check_bare(ids)
    # an object of this class comes from a processor of this copy of mmkit
    if is_multimodal and not isinstance(prompt.get("mm_kwargs"), CheckedKwargsItems):
        _check_foreign_fields(plan, prompt, is_trusted and ids is not None)


def _find_embedded_ids(prompt: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the token ids of a prompt that the model embeds; None where there are none.

    A prompt may have embeddings for some positions and ids for the others. What stands in place of
    an id at the former is vLLM's own, and may lie outside the vocabulary.
    """
    ids: Sequence[Any] | None = prompt.get("prompt_token_ids")
    # the name before rendering, and after it
    mask = prompt.get("is_token_ids", prompt.get("prompt_is_token_ids"))
    if ids is None or mask is None:
        return ids
    return [token for token, is_embedded in zip(ids, mask, strict=False) if is_embedded]


def _check_prompt_embeds(plan: Plan, prompt: Mapping[str, Any]) -> None:
    """Refuse embeddings in place of a prompt's tokens that the language model cannot carry."""
    for rows in _find_prompt_embeds(prompt):
        where = f"{plan.spec.name}.prompt_embeds"
        if plan.spec.is_raw:
            remedy = "The model reads nothing of a prompt."
            raise InputError(where, "one item per request", "embeddings of a prompt", remedy)
        if isinstance(rows, torch.Tensor) and rows.ndim == 3 and len(rows) == 1:
            rows = rows[0]  # vLLM takes a batch of one
        check_rows(rows, where, width=plan.hidden_size, dtype=plan.dtype)


def _find_prompt_embeds(prompt: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the embeddings of a prompt: as a whole, or as parts of a message beside items."""
    if prompt.get("prompt_embeds") is not None:
        yield prompt["prompt_embeds"]
    if prompt.get("type") == "multimodal":
        # vLLM puts these into its cache of encoder outputs, as if an encoder had made them
        for item in (prompt.get("mm_kwargs") or {}).get(PROMPT_EMBEDS, ()):
            if item is not None:
                yield item["embedding"].data


def _check_foreign_fields(plan: Plan, prompt: Mapping[str, Any], is_trusted: bool) -> None:
    """Refuse processed fields that no processor of this process has made.

    Where they are trusted, refuse those that are not the model's, have another form than those of
    all other requests, or hold a float that is not finite. Other values, and hashes, are not looked
    at.
    """
    where = f"{plan.spec.name}.mm_kwargs"
    if not is_trusted:
        remedy = f"Send the items themselves, or start the server with {TRUST}."
        raise InputError(where, "raw items", "processed fields", remedy)
    items_by_modality = prompt["mm_kwargs"]
    ranges_by_modality = prompt.get("mm_placeholders") or {}
    names = {*items_by_modality, *ranges_by_modality}
    plan.check_names(names)
    for name in names:
        modality = plan.modalities[name]
        if modality.is_ids_only:
            remedy = "Its ids in the prompt stand for an item."
            raise InputError(f"{where}.{name}", "no fields", "some", remedy)
        items = items_by_modality.get(name, ())
        ranges = ranges_by_modality.get(name, ())
        _check_names_and_ranges(
            {*modality.fields_and_embeds, row_count_field(name)},
            items,
            ranges,
            len(prompt["prompt_token_ids"]),
            f"{where}.{name}",
        )
        fields = [_list_fields(item) for item in items]
        for index, fields_of_item in enumerate(fields):
            _check_finite_fields(fields_of_item, f"{where}.{name}[{index}]")
        modality.check_forms(fields)


def _check_names_and_ranges(
    declared_names: set[str],
    items: Sequence[Any],
    ranges: Sequence[Any],
    prompt_length: int,
    where: str,
) -> None:
    """Refuse fields that the model does not have, and items without a range in the prompt."""
    names: set[str] = set()
    for item in items:
        names.update(item or ())
    are_inside = True
    for placeholders in ranges:
        if placeholders.offset + placeholders.length > prompt_length:
            are_inside = False
    if len(items) != len(ranges) or not names <= declared_names or not are_inside:
        expected = f"fields among {sorted(declared_names)}, and a range in the prompt for each item"
        raise InputError(where, expected, f"{sorted(names)} and {list(ranges)}")


def _list_fields(item: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of an item's fields, by name; none of an item that the engine has."""
    return {key: getattr(element, "data", element) for key, element in (item or {}).items()}


def _check_finite_fields(fields: Mapping[str, Any], where: str) -> None:
    """Refuse an item of which a processed field holds a float that is not finite."""
    for key, values in fields.items():
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            continue
        if not torch.isfinite(values).all():
            raise InputError(f"{where}.{key}", "finite values", "NaN or an infinity")
