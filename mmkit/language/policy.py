"""A model as the policy of a robot: how an observation becomes a request, and which output acts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, TypeAlias

from ..errors import SpecError, locate_errors
from .expr import Expr, Value, as_expression, as_expression_tuple, as_expressions
from .named_part import check_name, require, require_known_when_bound
from .node import Converted, Part, evaluate_all, parameter

INSTRUCTION = "{prompt}"
"""What stands for the instruction in the prompt of a policy."""

PROMPT_KEY = "prompt"
"""The key of the instruction in an observation."""


class Concat(Part):
    """Several values of an observation that are one item, one after the other.

    Make it with `concat`.
    """

    keys: Converted[Sequence[Value], tuple[Any, ...]] = parameter(as_expression_tuple)

    _word = "concat"

    def _write_arguments(self) -> Iterator[str]:
        for key in self.keys:
            yield repr(key)


def concat(*keys: Value) -> Concat:
    """Make one item of several values of an observation: numbers, or arrays of one dimension.

    ``concat("observation/joint_position", "observation/gripper_position")`` is one state of 8
    values, of which a robot sends 7 joints and its gripper apart.

    Args:
        keys: keys of the observation, or expressions for a key or a list of them.
    """
    return Concat(keys)


Keys: TypeAlias = "Value | Concat | Sequence[Value | Concat]"
"""The items of a modality: one key, or one key or `concat` for each item; or an expression."""


def _convert_items(items: Any) -> dict[str, Any]:
    """Return the items of each modality as a tuple, or as an expression that is known later."""
    if not isinstance(items, Mapping):
        expected = "a dict of keys of the observation by modality"
        raise SpecError("policy, items", expected, repr(items))
    converted = {}
    for modality, keys in items.items():
        keys = as_expression(keys)
        if isinstance(keys, (str, Concat)):
            keys = (keys,)
        elif isinstance(keys, (list, tuple)):
            keys = as_expression_tuple(keys)
        converted[modality] = keys
    return converted


def _convert_names(names: Any) -> Any:
    """Return a tuple of names, or an expression that is known later."""
    if isinstance(names, (list, tuple)):
        return as_expression_tuple(names)
    return as_expression(names)


class Policy(Part):
    """How a robot drives the model: an observation comes in, actions go out.

    A server of such a spec has ``WS /v1/realtime/robot/openpi``, the protocol of openpi's clients.

    All but `output` may have expressions of `cfg` and `tok`, where checkpoints differ.

    Attributes:
        output: the name of the output that is the actions, with one row for each step of a chunk;
            an array of one dimension is a chunk of one step.
        items: by modality what of an observation its items are, in the order in which the prompt
            has them: one key, or a list of keys, one for each item. `concat` makes one item of
            several keys. The key ``observation/image`` is also that of ``image`` in a map under
            ``observation``.
        prompt: the text that the model reads, with ``{prompt}`` in place of the instruction, which
            is the text under the key ``prompt``. Without ``{prompt}`` there is no such key.
        instruction: the instruction of an observation without one; None refuses it.
        ignored: keys that robots send and the model does not read, with all that is under them.
            Other keys are refused.
        sampling: fields of vLLM's `SamplingParams`.
        metadata: what the server tells a robot beside the model, the keys and the size of a chunk:
            plain values by name.

    Raises:
        SpecError: names the part that cannot be.
    """

    output: str
    items: Converted[Mapping[str, Keys], Mapping[str, Any]] = parameter(_convert_items)
    prompt: Converted[Value, Any] = parameter(as_expression, default=INSTRUCTION)
    _: KW_ONLY
    instruction: Converted[Value | None, Any] = parameter(as_expression, default=None)
    ignored: Converted[Value | Sequence[Value], Any] = parameter(_convert_names, default=())
    sampling: Converted[Mapping[str, Any], Any] = parameter(
        as_expressions, default_factory=lambda: {"temperature": 0.0}
    )
    metadata: Converted[Mapping[str, Any], Any] = parameter(as_expressions, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("policy")

    def bind(self, scope: Any) -> Policy:
        """Return this policy with its expressions evaluated, and checked again.

        Raises:
            SpecError: a value that the config lacks, or that cannot be.
        """
        values: dict[str, Any] = {}
        for name in self._names:
            with locate_errors(f"policy, {name}"):
                values[name] = evaluate_all(getattr(self, name), scope)
        return Policy(**values)

    def list_items(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the modality of each item, with its keys; expressions are left out."""
        items = []
        for modality, keys_of_items in self.items.items():
            if isinstance(keys_of_items, Expr):
                continue
            for keys in keys_of_items:
                items.append((modality, _flatten_keys(keys)))
        return items

    # -- the checks; what is an expression still is checked when the policy is bound --

    def _check(self, where: str) -> None:
        check_name(self.output, f"{where}, output")
        require(self.items, f"{where}, items", "at least one modality", "none")
        for name in ("prompt", "instruction"):
            text = getattr(self, name)
            is_text = text is None or isinstance(text, (str, Expr))
            require(is_text, f"{where}, {name}", "a text", repr(text))
        require(self.prompt is not None, f"{where}, prompt", "a text", "None")
        self._check_instruction(where)
        self._check_keys(where)
        for name in ("sampling", "metadata"):
            value = getattr(self, name)
            is_mapping = isinstance(value, (Mapping, Expr))
            require(is_mapping, f"{where}, {name}", "a dict", repr(value))
        _check_plain(self.metadata, f"{where}, metadata")
        require_known_when_bound(self, where)

    def _check_instruction(self, where: str) -> None:
        """Refuse an instruction that no prompt has."""
        if self.instruction is None or isinstance(self.prompt, Expr):
            return
        expected = f"a prompt with {INSTRUCTION} beside an instruction"
        require(INSTRUCTION in self.prompt, f"{where}, prompt", expected, repr(self.prompt))

    def _check_keys(self, where: str) -> None:
        """Refuse what is no key, and keys that come twice."""
        is_sequence = isinstance(self.ignored, (tuple, Expr))
        require(is_sequence, f"{where}, ignored", "a list of keys", repr(self.ignored))
        used_keys: set[str] = set()
        if not isinstance(self.prompt, Expr) and INSTRUCTION in self.prompt:
            used_keys.add(PROMPT_KEY)
        keys: list[Any] = []
        for modality, keys_of_items in self.items.items():
            check_name(modality, f"{where}, items")
            is_known_form = isinstance(keys_of_items, (tuple, Expr))
            expected = "a key, or a list with one for each item"
            where_of_items = f"{where}, items[{modality!r}]"
            require(is_known_form, where_of_items, expected, repr(keys_of_items))
        for _, keys_of_item in self.list_items():
            require(keys_of_item, f"{where}, items", "at least one key in concat()", "none")
            keys += keys_of_item
        if not isinstance(self.ignored, Expr):
            keys += self.ignored
        for key in keys:
            if isinstance(key, Expr):
                continue
            is_key = isinstance(key, str) and key.strip("/") == key != ""
            expected = 'keys of the observation, as "observation/image"'
            require(is_key, where, expected, repr(key))
            require(key not in used_keys, where, f"the key {key!r} in one place", "several")
            used_keys.add(key)
        self._check_ignored(used_keys, where)

    def _check_ignored(self, used_keys: set[str], where: str) -> None:
        """Refuse an ignored key under which another key is read."""
        if isinstance(self.ignored, Expr):
            return
        for ignored in self.ignored:
            for key in used_keys:
                hides = isinstance(ignored, str) and key.startswith(f"{ignored}/")
                expected = f"ignored keys beside {key!r}"
                require(not hides, f"{where}, ignored", expected, f"{ignored!r}, which hides it")


def _flatten_keys(keys: Any) -> tuple[Any, ...]:
    """Return the keys of one item; a value of an expression may be a list of them."""
    if not isinstance(keys, Concat):
        return (keys,)
    flat: list[Any] = []
    for key in keys.keys:
        if isinstance(key, (list, tuple)):
            flat += key
        else:
            flat.append(key)
    return tuple(flat)


def _check_plain(value: Any, where: str) -> None:
    """Refuse values that a robot cannot be told: other than texts, numbers, lists and dicts."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            require(isinstance(name, str), where, "names that are texts", repr(name))
            _check_plain(part, f"{where}[{name!r}]")
    elif isinstance(value, (list, tuple)):
        for part in value:
            _check_plain(part, where)
    else:
        is_plain = value is None or isinstance(value, (str, int, float, Expr))
        require(is_plain, where, "texts, numbers, lists and dicts", repr(value))
