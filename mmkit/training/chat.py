"""Messages as vLLM's chat reads them: what a template receives of a message, and its items.

So a conversation has the ids in training that it has in a server. vLLM is not needed.
tests/path/test_chat.py compares both, for drawn conversations and templates.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import InputError
from ..language.layout import Insert
from ..language.messages import TEXT_PARTS, gather_items
from ..language.spec import Declaration
from .template import ContentFormat

SKIPPED_WITHOUT_TEXT = ("text", "refusal")
"""The types of the parts that vLLM leaves out where their text is None."""


class TargetText(NamedTuple):
    """What a caller writes for an item, in a message that becomes one text.

    Attributes:
        modality: of the item.
        text: None where the caller writes nothing for an item.
    """

    modality: str
    text: str | None


class Conversation:
    """Reads the messages of one conversation.

    Attributes:
        items: by modality, the items of the messages that were read, in order.
        left_out: per message that was read, the entries that vLLM does not pass on to a template.
    """

    def __init__(
        self,
        spec: Declaration,
        modalities: Collection[str],
        content_format: ContentFormat,
        *,
        interleave_mm_strings: bool = False,
    ) -> None:
        self.spec = spec
        self.modalities = modalities
        self.content_format = content_format
        self.interleave_mm_strings = interleave_mm_strings
        self.items: dict[str, list[Any]] = {}
        self.left_out: list[dict[str, Any]] = []

    def parse_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the template receives of a message; its items go to `items`.

        Raises:
            InputError: a message without a role, a part or a tool call that is malformed, more
                placeholders in the texts than items, or an item that has no placeholder.
        """
        where = f"{self.spec.name}.conversation[{len(self.left_out)}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise InputError(where, "a message with a role and a content", repr(message))
        entries = {"role": role, "content": self._parse_content(message, role, where)}
        entries.update(_parse_entries(message, role, where))
        left_out = {}
        for name, value in message.items():
            if name not in entries and value is not None:
                left_out[name] = value
        self.left_out.append(left_out)
        return entries

    def gather_data(self) -> dict[str, Any]:
        """Return the items of the messages that were read, as the data of a request.

        Raises:
            InputError: precomputed embeddings beside other items of their modality.
        """
        data: dict[str, Any] = {}
        for name, items in self.items.items():
            data[name] = gather_items(f"{self.spec.name}.{name}", f"{name}_embeds", items)
        return data

    # -- the content of a message ------------------------------------------------------------------

    def _parse_content(self, message: Mapping[str, Any], role: str, where: str) -> Any:
        """Return the content of a message as the template gets it: a text, or a list of parts."""
        parts = self._parse_parts(message.get("content"), where)
        if self.content_format == "string":
            return self._join_parts(parts, where)
        is_text = all(part["type"] == "text" for part in parts)
        if role == "tool" and is_text:
            return "\n".join(part["text"] for part in parts)
        return parts

    def _parse_parts(self, content: Any, where: str) -> list[Any]:
        """Return the parts of a message in order.

        They are dicts, or, for a template that receives one text, strings and `TargetText`.
        """
        if content is None:
            return []
        if isinstance(content, str):
            content = [content]
        if not isinstance(content, (list, tuple)):
            raise InputError(f"{where}.content", "a text or a list of parts", repr(content))
        parts: list[Any] = []
        for i, value in enumerate(content):
            part = self._parse_part(value, f"{where}.content[{i}]")
            if part is not None:
                parts.append(part)
        return parts

    def _parse_part(self, part: Any, where: str) -> dict[str, Any] | str | TargetText | None:
        """Return a part as the template gets it; None if it does not get the part."""
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in self.modalities and kind in part:
            return self._parse_item(part, kind, where)
        if kind not in TEXT_PARTS:
            forms = [f'{{"type": "{name}", "{name}": ...}}' for name in ("text", *self.modalities)]
            raise InputError(where, f"a part {' or '.join(forms)}", f"type {kind!r}")
        text = part.get(TEXT_PARTS[kind])
        if text is None and kind in SKIPPED_WITHOUT_TEXT:
            return None
        if not isinstance(text, str):
            raise InputError(where, "a part with a text", repr(text))
        if self.content_format == "openai":
            return {**part, "type": "text", "text": text}
        return text or None

    def _parse_item(
        self, part: Mapping[str, Any], modality: str, where: str
    ) -> dict[str, Any] | TargetText:
        """Store the item of a part, and return what the template gets in its place."""
        items = self.items.setdefault(modality, [])
        items.append(part[modality])
        if self.content_format == "openai":
            return {key: value for key, value in part.items() if key not in (modality, "uuid")}
        text = self.spec.placeholder_text(modality, len(items) - 1)
        updates = self.spec[modality].update
        if text is None and not all(isinstance(update, Insert) for update in updates):
            expected = "a target with a text in messages"
            remedy = "Use a chat template that reads parts, or write the prompt yourself."
            raise InputError(where, expected, "one that is an id", remedy)
        return TargetText(modality, text)

    def _join_parts(self, parts: Sequence[str | TargetText], where: str) -> str:
        """Return the content of a message as one text.

        Before the texts stand the targets that the texts do not hold themselves, modality by
        modality.
        """
        targets: dict[str, list[str]] = {}
        lines: list[str] = []
        for part in parts:
            if isinstance(part, str):
                lines.append(part)
            elif part.text is not None:
                targets.setdefault(part.modality, []).append(part.text)
                if self.interleave_mm_strings:
                    lines.append(part.text)
        text = "\n".join(lines)
        counts: Counter[str] = Counter()
        for texts in targets.values():
            counts.update(texts)
        missing: list[str] = []
        for target, count in counts.items():
            num_written = text.count(target)
            if num_written > count:
                got = f"{num_written} of them in the texts"
                raise InputError(where, f"{target!r} for {count} item(s)", got)
            missing += [target] * (count - num_written)
        if text:
            missing.append(text)
        return "\n".join(missing)


# -- other entries of a message --------------------------------------------------------------------


def _parse_entries(message: Mapping[str, Any], role: str, where: str) -> dict[str, Any]:
    """Return the entries of a message that vLLM passes on to a template beside role and content."""
    entries: dict[str, Any] = {}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            entries["tool_calls"] = _parse_tool_calls(calls, f"{where}.tool_calls")
        reasoning = message.get("reasoning")
        if reasoning is not None:
            entries["reasoning"] = reasoning
            entries["reasoning_content"] = reasoning
    if role == "tool" and "tool_call_id" in message:
        entries["tool_call_id"] = message["tool_call_id"]
    if role == "developer":
        entries["tools"] = message.get("tools")
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            entries[key] = message[key]
    return entries


def _parse_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of tools with their arguments as dicts, which clients send as JSON."""
    if not isinstance(calls, (list, tuple)):
        raise InputError(where, "a list of calls", repr(calls))
    tool_calls: list[dict[str, Any]] = []
    for i, call in enumerate(calls):
        where_of_call = f"{where}[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            expected = 'a call {"type": "function", "function": ...}'
            raise InputError(where_of_call, expected, repr(call))
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            with suppress(ValueError):  # refused below, as the text that it is
                arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping):
            where_of_arguments = f"{where_of_call}.function.arguments"
            raise InputError(where_of_arguments, "a JSON object", repr(arguments))
        tool_calls.append({**call, "function": {**function, "arguments": arguments}})
    return tool_calls
