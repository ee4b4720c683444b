"""Messages with items in them, as a prompt and its items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from .processor import Processor

Messages = Sequence[Mapping[str, Any]]


def apply(
    processor: Processor,
    conversation: Messages | Sequence[Messages],
    chat_template: str | None = None,
    *,
    tokenize: bool = False,
    return_dict: bool = False,
    processor_kwargs: Mapping[str, Any] | None = None,
    return_tensors: str | None = "pt",
    **options: Any,
) -> Any:
    """A conversation, or a list of conversations, as text or as tensors.

    The content of a message is a text or a list of parts, ``{"type": "text", "text": ...}`` and
    ``{"type": "series", "series": item}`` with the name of a modality. A template that knows the
    type writes the placeholder of the item; otherwise the placeholder is the text of the spec's
    `replace`. A template without types receives one text, as in vLLM: the placeholders, then the
    texts.

    Args:
        processor: the spec's processor.
        conversation: messages with `role` and `content`.
        chat_template: a template, or the name of one, in place of the processor's.
        tokenize: return tensors: the `input_ids` alone, or all with ``return_dict=True``.
        return_dict: with `tokenize`, return the whole result of `Processor.__call__`.
        processor_kwargs: arguments of that call, for example `padding`.
        return_tensors: another argument of that call.
        options: of the tokenizer's `apply_chat_template`, for example `add_generation_prompt` and
            `tools`; the template receives options that the tokenizer does not know.

    Raises:
        InputError: the model has no tokenizer, there is no template, a part is malformed, or
            neither the template nor the spec has a placeholder for an item.
    """
    where, known = f"{processor.spec.name}.conversation", processor.chat_template
    if (tokenizer := getattr(processor, "tokenizer", None)) is None:
        raise InputError(where, "a model with a tokenizer", "one without", "Call it with ids.")
    if isinstance(known, Mapping):
        chat_template = known.get(chat_template or "default", chat_template)
    options["chat_template"] = template = chat_template or known
    if not isinstance(template, str):
        raise InputError(where, "a chat template", "none", "Give chat_template=.")
    is_one = bool(conversation) and isinstance(conversation[0], Mapping)
    conversations: Sequence[Any] = [conversation] if is_one else conversation
    texts, data = [], []
    for messages in conversations:
        items: dict[str, list[Any]] = {}
        rendered = [_without_items(processor, one, items, template) for one in messages]
        texts.append(tokenizer.apply_chat_template(rendered, tokenize=False, **options))
        data.append(items)
    if not tokenize:
        return texts[0] if is_one else texts
    ids = [processor.plan.encode(text, add_special_tokens=False) for text in texts]
    sent = {name: [own.get(name) for own in data] for own in data for name in own}
    asked: dict[str, Any] = {"return_tensors": return_tensors, **(processor_kwargs or {}), **sent}
    batch = processor(input_ids=ids, **asked)
    return batch if return_dict else batch["input_ids"]


def _without_items(
    processor: Processor, message: Mapping[str, Any], items: dict[str, list[Any]], template: str
) -> dict[str, Any]:
    """A message in the template's form; its items go to `items`."""
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    has_types = any(f"{before}type" in template for before in (".", "['", '["'))
    where, modalities = f"{processor.spec.name}.conversation", processor.plan.modalities
    parts: list[dict[str, Any]] = []
    for part in content:
        name = part.get("type") if isinstance(part, Mapping) else None
        if name == "text":
            parts.append(dict(part))
            continue
        if name not in modalities or name not in part:
            known = (f'{{"type": "{key}", "{key}": ...}}' for key in ("text", *modalities))
            raise InputError(where, f"parts {' or '.join(known)}", f"type {name!r}")
        items.setdefault(name, []).append(part[name])
        if has_types and any(f"{quote}{name}{quote}" in template for quote in "'\""):
            parts.append({"type": name})
            continue
        text = processor.spec.placeholder_text(name, len(items[name]) - 1)
        if text is None:
            expected = f"a chat template with the type {name}, or replace() of a text in the spec"
            raise InputError(where, expected, "neither")
        parts.append({"type": "text", "text": text, "of": name})
    if has_types:
        return {**message, "content": parts}
    in_order = sorted(parts, key=lambda part: "of" not in part)  # placeholders first
    return {**message, "content": "\n".join(part["text"] for part in in_order)}
