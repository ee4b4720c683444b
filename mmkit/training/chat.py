"""Messages as vLLM's chat reads them, so that a conversation has the ids in training that it has in
a server: which form of messages a template takes, and what a template receives of a message.

vLLM is not needed. tests/path/test_chat.py compares both, for drawn conversations and templates.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

from jinja2 import TemplateError, nodes
from transformers.utils import chat_template_utils

from ..errors import InputError
from ..language.layout import Insert
from ..language.messages import TEXT_PARTS, gather_items
from ..language.spec import Declaration

ContentFormat: TypeAlias = Literal["string", "openai"]
"""vLLM's names for what a template receives as the content of a message: one text, or parts."""

SKIPPED_WITHOUT_TEXT = ("text", "refusal")
"""The types of the parts that vLLM leaves out where their text is None."""


class Placeholder(NamedTuple):
    """The text of an item in a message.

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

    def read(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the template receives of a message; its items go to `items`.

        Raises:
            InputError: a message without a role, a part or a tool call that is malformed, more
                placeholders in the texts than items, or an item that has no placeholder.
        """
        where = f"{self.spec.name}.conversation[{len(self.left_out)}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise InputError(where, "a message with a role and a content", repr(message))
        parts = self._parts(message.get("content"), where)
        if self.content_format == "string":
            content: Any = self._joined(parts, where)
        else:
            content = [part for part in parts if isinstance(part, dict)]
            is_text = all(part["type"] == "text" for part in content)
            if role == "tool" and is_text:
                content = "\n".join(part["text"] for part in content)
        read = {"role": role, "content": content, **_passed_on(message, role, where)}
        rest = {key: value for key, value in message.items() if key not in read}
        self.left_out.append({key: value for key, value in rest.items() if value is not None})
        return read

    def data(self) -> dict[str, Any]:
        """Return the items of the messages that were read, as the data of a request.

        Raises:
            InputError: precomputed embeddings beside other items of their modality.
        """
        data: dict[str, Any] = {}
        for name, items in self.items.items():
            data[name] = gather_items(f"{self.spec.name}.{name}", f"{name}_embeds", items)
        return data

    # -- parts of a message ------------------------------------------------------------------------

    def _parts(self, content: Any, where: str) -> list[dict[str, Any] | str | Placeholder]:
        """Return the parts of a message in order, those of a template of texts as texts and
        placeholders."""
        if content is None:
            return []
        if isinstance(content, str):
            content = [content]
        if not isinstance(content, (list, tuple)):
            raise InputError(f"{where}.content", "a text or a list of parts", repr(content))
        parts: list[dict[str, Any] | str | Placeholder] = []
        for i, part in enumerate(content):
            read = self._part(part, f"{where}.content[{i}]")
            if read is not None:
                parts.append(read)
        return parts

    def _part(self, part: Any, where: str) -> dict[str, Any] | str | Placeholder | None:
        """Return a part as the template gets it; None for one that it does not get."""
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in self.modalities and kind in part:
            return self._item(part, kind, where)
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

    def _item(
        self, part: Mapping[str, Any], modality: str, where: str
    ) -> dict[str, Any] | Placeholder:
        """Keep the item of a part, and return what stands for it."""
        items = self.items.setdefault(modality, [])
        items.append(part[modality])
        if self.content_format == "openai":
            return {key: value for key, value in part.items() if key not in (modality, "uuid")}
        text = self.spec.placeholder_text(modality, len(items) - 1)
        updates = self.spec[modality].update
        if text is None and not all(isinstance(update, Insert) for update in updates):
            expected = "a placeholder with a text in messages"
            remedy = "Use a chat template that reads parts, or write the prompt yourself."
            raise InputError(where, expected, "one that is an id", remedy)
        return Placeholder(modality, text)

    def _joined(self, parts: Sequence[Any], where: str) -> str:
        """Return the content of a message as one text: before the texts the placeholders that the
        texts do not hold themselves, modality by modality."""
        placeholders: dict[str, list[str]] = {}
        lines: list[str] = []
        for part in parts:
            if isinstance(part, str):
                lines.append(part)
            elif part.text is not None:
                placeholders.setdefault(part.modality, []).append(part.text)
                if self.interleave_mm_strings:
                    lines.append(part.text)
        text = "\n".join(lines)
        expected = Counter(text for texts in placeholders.values() for text in texts)
        missing: list[str] = []
        for placeholder, count in expected.items():
            written = text.count(placeholder)
            if written > count:
                got = f"{written} of them in the texts"
                raise InputError(where, f"{placeholder!r} for {count} item(s)", got)
            missing += [placeholder] * (count - written)
        return "\n".join([*missing, text] if text else missing)


# -- other entries of a message --------------------------------------------------------------------


def _passed_on(message: Mapping[str, Any], role: str, where: str) -> dict[str, Any]:
    """Return the entries of a message that vLLM passes on to a template beside role and content."""
    entries: dict[str, Any] = {}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            entries["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
        reasoning = message.get("reasoning")
        if reasoning is not None:
            entries["reasoning"] = entries["reasoning_content"] = reasoning
    if role == "tool" and "tool_call_id" in message:
        entries["tool_call_id"] = message["tool_call_id"]
    if role == "developer":
        entries["tools"] = message.get("tools")
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            entries[key] = message[key]
    return entries


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of tools with their arguments as dicts, which clients send as JSON."""
    if not isinstance(calls, (list, tuple)):
        raise InputError(where, "a list of calls", repr(calls))
    read: list[dict[str, Any]] = []
    for i, call in enumerate(calls):
        at = f"{where}[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise InputError(at, 'a call {"type": "function", "function": ...}', repr(call))
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            with suppress(ValueError):  # refused below, as the text that it is
                arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping):
            raise InputError(f"{at}.function.arguments", "a JSON object", repr(arguments))
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


# -- the form of a template ------------------------------------------------------------------------


@lru_cache(maxsize=32)
def content_format(template: str) -> ContentFormat:
    """Return "openai" if a template has a loop over the parts of a message, else "string".

    vLLM tells the form by the syntax of the template. It follows the names that come from
    `messages`, the names of the loops over them, and the parameters of macros that receive the
    content of a message; and it gives up at a loop or an assignment of several names.
    """
    try:
        # with the extensions and the whitespace of transformers
        environment = chat_template_utils._compile_jinja_template(template).environment
        tree = environment.parse(template)
    except TemplateError:
        return "string"  # the tokenizer refuses it
    try:
        has_loop = any(_is_content_loop(loop, tree) for loop in tree.find_all(nodes.For))
    except _SeveralNames:
        return "string"
    return "openai" if has_loop else "string"


class _SeveralNames(Exception):
    """A loop or an assignment of several names where vLLM expects one."""


def _is_content_loop(loop: nodes.For, tree: nodes.Template) -> bool:
    """Whether a loop runs over the parts of a message."""
    messages = _message_names(tree)
    is_loop = any(_reads(loop.iter, name, "content") for name in messages)
    if not is_loop and isinstance(loop.iter, nodes.Name):
        macros = [macro for macro in tree.find_all(nodes.Macro) if _holds(macro, loop)]
        received = [*filter(None, (_content_parameters(macro, tree) for macro in macros))]
        if received:
            is_loop = loop.iter.name in received[-1]
        elif not macros:
            is_loop = loop.iter.name == "content"
    if is_loop:
        _name_of(loop.target)
    return is_loop


def _message_names(tree: nodes.Template) -> list[str]:
    """Return the names of the loops over messages."""
    names: list[str] = []
    lists = _list_names(tree)
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            names.append(_name_of(loop.target))
    return names


def _list_names(tree: nodes.Template) -> list[str]:
    """Return `messages`, and the names that are assigned from it, directly or not."""
    names = ["messages"]
    for name in names:  # grows in the loop
        for assignment in tree.find_all(nodes.Assign):
            if _reads(assignment.node, name):
                target = _name_of(assignment.target)
                if target not in names:
                    names.append(target)
    return names


def _content_parameters(macro: nodes.Macro, tree: nodes.Template) -> set[str]:
    """Return the parameters of a macro that receive the content of a message in some call."""
    messages = _message_names(tree)
    parameters = [parameter.name for parameter in macro.args]
    received: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        by_position = zip(parameters, call.args, strict=False)
        by_name = ((argument.key, argument.value) for argument in call.kwargs)
        for name, value in (*by_position, *by_name):
            if name in parameters and any(_reads(value, one, "content") for one in messages):
                received.add(name)
    return received


def _holds(macro: nodes.Macro, loop: nodes.For) -> bool:
    return any(inner is loop for inner in macro.find_all(nodes.For))


def _reads(node: nodes.Node, name: str, key: str = "") -> bool:
    """Whether an expression is a variable, or its entry of that key, or elements of it: behind
    filters, tests and slices."""
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return node.node is not None and _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if not key:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getattr):
        return node.attr == key and _reads_name(node.node, name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value == key and _reads_name(node.node, name)
    return False


def _reads_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name_of(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _SeveralNames
    return target.name


def has_role(template: str, role: str) -> bool:
    """Whether a template names a role."""
    return f"'{role}'" in template or f'"{role}"' in template
