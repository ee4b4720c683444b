"""The chat template of a conversation.

Which one vLLM takes, which form of messages it receives, and the text that it makes of them. vLLM
is not needed: tests/path/test_chat.py compares both, for drawn conversations and templates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from jinja2 import TemplateError, nodes
from transformers.utils import chat_template_utils

from ..errors import InputError, convert_errors

ContentFormat: TypeAlias = Literal["string", "openai"]
"""vLLM's names for what a template receives as the content of a message: one text, or parts."""


def choose_template(
    where: str, name: str | None, processor_template: Any, tokenizer_template: Any, tools: Any
) -> str:
    """Return the chat template that vLLM takes.

    Args:
        where: names the argument `chat_template` in errors.
        name: a template, or the name of one, that the caller asks for.
        processor_template: the template of the processor, or its templates by name, or None.
        tokenizer_template: the same of the tokenizer.
        tools: of the conversation. With tools, the tokenizer's template comes first.

    Raises:
        InputError: there is none.
    """
    if name is not None:
        templates = dict(_templates_by_name(processor_template))
        templates.update(_templates_by_name(tokenizer_template))
        if name in templates:
            return str(templates[name])
        if "{" not in name:
            expected = f"a template, or a name among {sorted(templates)}"
            raise InputError(where, expected, repr(name))
        return name
    templates = dict(_templates_by_name(processor_template))
    if tools is not None and tokenizer_template is not None:
        templates = dict(_templates_by_name(tokenizer_template))
    template = templates.get("default")
    if tools is not None and "tool_use" in templates:
        template = templates["tool_use"]
    if not isinstance(template, str):
        raise InputError(where, "a chat template", "none", "Give chat_template=.")
    return template


def _templates_by_name(templates: Any) -> Mapping[str, Any]:
    """Return the templates of a tokenizer or a processor, which has none, one or several."""
    if templates is None:
        return {}
    if isinstance(templates, Mapping):
        return templates
    return {"default": templates}


# -- the text --------------------------------------------------------------------------------------


def render_messages(
    where: str,
    tokenizer: Any,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    left_out: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> str:
    """Return the text of a conversation.

    Args:
        where: names the conversation in errors.
        tokenizer: renders the template.
        template: the chat template.
        messages: as vLLM passes them to the template.
        left_out: per message, the entries that vLLM does not pass on.
        options: of the tokenizer and the template.

    Raises:
        InputError: the template refuses the messages, or reads what vLLM does not pass on.
    """

    def render(conversation: Sequence[Mapping[str, Any]]) -> str:
        text: str = tokenizer.apply_chat_template(
            conversation, chat_template=template, tokenize=False, **options
        )
        return text

    if not has_role(template, "developer"):
        for i, message in enumerate(messages):
            if message["role"] == "developer":
                # some releases of vLLM make it a system message, and merge these into one
                remedy = "Write a system message."
                got = "developer, which it does not name"
                raise InputError(f"{where}[{i}]", "a role of the chat template", got, remedy)
    with convert_errors(where, "messages that the chat template takes", InputError):
        text = render(messages)
    if any(left_out):
        whole = []
        for message, entries in zip(messages, left_out, strict=True):
            whole.append({**message, **entries})
        try:
            is_changed = render(whole) != text
        except Exception:  # of the template, which cannot take what it reads
            is_changed = True
        if is_changed:
            names: set[str] = set()
            for entries in left_out:
                names.update(entries)
            expected = "messages of which vLLM's chat passes all on to the template"
            got = f"{sorted(names)} as well, which it reads"
            remedy = "Write the thoughts of a message as its reasoning, and leave out others."
            raise InputError(where, expected, got, remedy)
    return text


def has_role(template: str, role: str) -> bool:
    """Return whether a template names a role."""
    return f"'{role}'" in template or f'"{role}"' in template


# -- the form of messages --------------------------------------------------------------------------


@lru_cache(maxsize=32)
def detect_content_format(template: str) -> ContentFormat:
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
        messages = _find_message_names(tree)
        for loop in tree.find_all(nodes.For):
            if _is_content_loop(loop, tree, messages):
                return "openai"
    except _SeveralNamesError:
        pass
    return "string"


class _SeveralNamesError(Exception):
    """A loop or an assignment of several names where vLLM expects one."""


def _is_content_loop(loop: nodes.For, tree: nodes.Template, messages: Sequence[str]) -> bool:
    """Return whether a loop runs over the parts of a message.

    Args:
        loop: a loop of the template.
        tree: the template.
        messages: the names of the loops over messages.
    """
    is_loop = _reads_content(loop.iter, messages)
    if not is_loop and isinstance(loop.iter, nodes.Name):
        is_loop = loop.iter.name in _find_content_names(loop, tree, messages)
    if is_loop:
        _get_name(loop.target)
    return is_loop


def _find_content_names(loop: nodes.For, tree: nodes.Template, messages: Sequence[str]) -> set[str]:
    """Return the variables that hold the content of a message where a loop stands.

    In a macro they are its parameters that receive the content in some call. Of nested macros, the
    last that receives it counts. Outside of macros vLLM takes the name `content` for the content.
    """
    macros = [macro for macro in tree.find_all(nodes.Macro) if _contains(macro, loop)]
    if not macros:
        return {"content"}
    names: set[str] = set()
    for macro in macros:
        parameters = _find_content_parameters(macro, tree, messages)
        if parameters:
            names = parameters
    return names


def _find_content_parameters(
    macro: nodes.Macro, tree: nodes.Template, messages: Sequence[str]
) -> set[str]:
    """Return the parameters of a macro that receive the content of a message in some call."""
    parameters = [parameter.name for parameter in macro.args]
    content_parameters: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        for name, value in _pair_arguments(parameters, call):
            if name in parameters and _reads_content(value, messages):
                content_parameters.add(name)
    return content_parameters


def _pair_arguments(parameters: Sequence[str], call: nodes.Call) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call, each with the name of its parameter."""
    yield from zip(parameters, call.args, strict=False)
    for argument in call.kwargs:
        yield argument.key, argument.value


def _reads_content(node: nodes.Node, messages: Sequence[str]) -> bool:
    """Return whether an expression is the content of a message, or elements of it."""
    return any(_reads(node, name, "content") for name in messages)


def _find_message_names(tree: nodes.Template) -> list[str]:
    """Return the names of the loops over messages."""
    names: list[str] = []
    lists = _find_list_names(tree)
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            names.append(_get_name(loop.target))
    return names


def _find_list_names(tree: nodes.Template) -> list[str]:
    """Return `messages`, and the names that are assigned from it, directly or not."""
    names = ["messages"]
    for name in names:  # grows in the loop
        for assignment in tree.find_all(nodes.Assign):
            if _reads(assignment.node, name):
                target = _get_name(assignment.target)
                if target not in names:
                    names.append(target)
    return names


def _contains(macro: nodes.Macro, loop: nodes.For) -> bool:
    """Return whether a loop stands in a macro."""
    return any(inner is loop for inner in macro.find_all(nodes.For))


def _reads(node: nodes.Node, name: str, key: str = "") -> bool:
    """Return whether an expression is a variable, or its entry of that key, or elements of it.

    It may stand behind filters, tests and slices.
    """
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return node.node is not None and _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if not key:
        return _is_variable(node, name)
    if isinstance(node, nodes.Getattr):
        return node.attr == key and _is_variable(node.node, name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value == key and _is_variable(node.node, name)
    return False


def _is_variable(node: nodes.Node, name: str) -> bool:
    """Return whether an expression is a variable of that name."""
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _get_name(target: nodes.Node) -> str:
    """Return the name of what a loop or an assignment binds.

    Raises:
        _SeveralNamesError: it binds several names.
    """
    if not isinstance(target, nodes.Name):
        raise _SeveralNamesError
    return target.name
