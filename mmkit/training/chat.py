"""Messages with items in them, as a prompt and its items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..bound.placeholder_text import placeholder_text
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
    where = f"{processor.spec.name}.conversation"
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None:
        raise InputError(where, "a model with a tokenizer", "one without", "Call it with ids.")
    template = _template(processor, chat_template, where)
    is_one = bool(conversation) and isinstance(conversation[0], Mapping)
    conversations: Sequence[Any] = [conversation] if is_one else conversation
    texts, data = [], []
    for messages in conversations:
        rendered, items = _without_items(processor, messages, template, where)
        texts.append(
            tokenizer.apply_chat_template(
                rendered, chat_template=template, tokenize=False, **options
            )
        )
        data.append(items)
    if not tokenize:
        return texts[0] if is_one else texts
    ids = [processor.plan.encode(text, add_special_tokens=False) for text in texts]
    sent = {name: [own.get(name) for own in data] for own in data for name in own}
    asked: dict[str, Any] = {"return_tensors": return_tensors, **(processor_kwargs or {}), **sent}
    batch = processor(input_ids=ids, **asked)
    return batch if return_dict else batch["input_ids"]


def _template(processor: Processor, named: str | None, where: str) -> str:
    known = processor.chat_template
    if isinstance(known, Mapping):
        named = known.get(named or "default", named)
    template = named or known
    if not isinstance(template, str):
        raise InputError(where, "a chat template", "none", "Give chat_template=.")
    return template


def _without_items(
    processor: Processor, messages: Messages, template: str, where: str
) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Messages in the template's form, and the items of the messages by modality."""
    items: dict[str, list[Any]] = {}
    rendered = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            parts = [_part(processor, part, items, template, where) for part in content]
            content = parts if _has_types(template) else _as_one_text(parts)
        rendered.append({**message, "content": content})
    return rendered, items


def _has_types(template: str) -> bool:
    """Whether a template reads the parts of a content."""
    return any(f"{before}type" in template for before in (".", "['", '["'))


def _part(
    processor: Processor, part: Any, items: dict[str, list[Any]], template: str, where: str
) -> dict[str, Any]:
    name = part.get("type") if isinstance(part, Mapping) else None
    if name == "text":
        return dict(part)
    modalities = processor.plan.modalities
    if name not in modalities or name not in part:
        known = " or ".join(f'{{"type": "{key}", "{key}": ...}}' for key in ("text", *modalities))
        raise InputError(where, f"parts {known}", f"type {name!r}")
    items.setdefault(name, []).append(part[name])
    if _has_types(template) and any(f"{q}{name}{q}" in template for q in "'\""):
        return {"type": name}
    text = placeholder_text(processor.spec, name, len(items[name]) - 1)
    if text is None:
        expected = f"a chat template with the type {name}, or replace() of a text in the spec"
        raise InputError(where, expected, "neither")
    return {"type": "text", "text": text, "of": name}


def _as_one_text(parts: Sequence[Mapping[str, Any]]) -> str:
    standing = [part["text"] for part in parts if "of" in part]
    return "\n".join([*standing, *(part["text"] for part in parts if "of" not in part)])
