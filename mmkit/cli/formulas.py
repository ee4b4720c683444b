"""The parts of a declaration as source, with the values that they have for a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..bound.modality import BoundModality
from ..bound.output import BoundOutput
from ..errors import MmkitError
from ..expr import STATIC, Expr, Node, Scope, evaluate, fold, is_op, leaves, parts, same
from ..field import Field
from ..items import ItemType, shape_text
from ..items.record import Record
from ..layout import Fixed, Layout, nothing
from ..model_spec import ModelSpec
from ..outputs import Output
from ..spec import Modality
from .common import plural
from .runs import notation, runs


@dataclass(frozen=True)
class Part:
    """One part of a modality: as declared, and its value for the checkpoint, empty where there is
    none to tell."""

    name: str
    formula: str
    value: str = ""


class _NamedLayout(Layout):
    text: str

    def __repr__(self) -> str:
        return self.text


class Names:
    """The expressions and layouts that a spec's module keeps in variables: what is written with
    them is short.

    Attributes:
        known: by name.
        used: the names that came up, in this order.
    """

    def __init__(self, known: Mapping[str, Node]) -> None:
        self.known, self.used = dict(known), dict[str, None]()

    @classmethod
    def of(cls, spec: ModelSpec) -> Names:
        """The variables of the module that declares a spec."""
        variables = getattr(sys.modules.get(spec._module), "__dict__", {})
        nodes = {name: value for name, value in variables.items() if isinstance(value, Node)}
        imported = {n for n, node in nodes.items() if is_op(node, "root") or same(node, nothing)}
        return cls({name: node for name, node in nodes.items() if name not in imported})

    def bound(self, scope: Scope) -> Names:
        """These variables with all known values filled in; variables that are known altogether are
        left out."""
        folded = {}
        for name, value in self.known.items():
            with suppress(MmkitError):  # a variable of another spec, maybe
                folded[name] = fold(value, scope)
        return Names({name: value for name, value in folded.items() if leaves(value)})

    def written(self, part: Any) -> str:
        """A part of a declaration as source."""
        return _source(self._in(part))

    def inside(self, name: str) -> str:
        """The value of a variable, written with the others."""
        return _source(self._in(self.known[name], but=name))

    def _in(self, part: Any, but: str = "") -> Any:
        for name, value in self.known.items():
            if name != but and type(part) is type(value) and same(part, value):
                self.used[name] = None
                is_layout = isinstance(part, Layout)
                return _NamedLayout(name) if is_layout else Expr("root", (name,))
        if isinstance(part, Node):
            return part._changed(self._in)
        if isinstance(part, (list, tuple)):
            return type(part)(map(self._in, part))
        if isinstance(part, Mapping):
            return {name: self._in(value) for name, value in part.items()}
        if not is_dataclass(part) or isinstance(part, type):
            return part
        changed = copy(part)
        for name in (f.name for f in fields(part)):
            object.__setattr__(changed, name, self._in(getattr(part, name)))
        return changed


def _source(part: Any) -> str:
    """A part as one would write it: an item type without what it has by default."""
    if not isinstance(part, ItemType) or not is_dataclass(part):
        return getattr(part, "__qualname__", repr(part))
    if isinstance(part, Record):
        parts = [f"{name}={_source(one)}" for name, one in part.parts.items()]
        return f"Record({', '.join(parts)})"
    stated = [(f, getattr(part, f.name)) for f in fields(part)]
    options = [f"{f.name}={value!r}" for f, value in stated if not same(value, f.default)]
    return f"{type(part).__name__}({', '.join(options)})"


def used_variables(names: Names, scope: Scope | None) -> list[Part]:
    """The variables that came up, and those that these are written with."""
    parts, waiting = {}, list(names.used)
    bound = names.bound(scope) if scope else Names({})
    while waiting:
        name = waiting.pop(0)
        formula = names.inside(name)
        value = bound.inside(name) if name in bound.known else ""
        if scope and _is_known(names.known[name]):
            value = _value(names.known[name], scope)
        parts[name] = Part(name, formula, value if value != formula else "")
        waiting += [other for other in names.used if other not in parts and other not in waiting]
    return [parts[name] for name in names.known if name in parts]


def _value(value: Any, scope: Scope) -> str:
    """The value of a variable that is known altogether."""
    if isinstance(value, Layout):
        try:
            block = value.lay(scope)
        except MmkitError:  # of an output
            return _allowed(value.allowed(scope))
        return notation(runs(block.ids, block.mask))
    known = evaluate(value, scope)
    plain = _plain(known)
    return repr(plain) if plain is known or isinstance(plain, dict) else plain


def declared_parts(
    modality: Modality,
    names: Names,
    bound: BoundModality | None = None,
    bound_names: Names | None = None,
) -> list[Part]:
    """The parts of a modality; those that need not be mentioned, only where they are."""
    write = names.written
    item, layout = "", ""
    if bound and bound_names:
        item, layout = bound.item.describe(), _layout_value(bound.placeholders.layout, bound_names)
    parts = [Part("item", write(modality.item), item)]
    parts.append(Part("layout", write(modality.layout), layout))
    parts += [Part("update", write(update)) for update in modality.update]
    for name, declared in modality.fields.items():
        form = _form(bound.fields[name]) if bound else ""
        parts.append(Part(f"field {name}", write(declared), form))
    parts.append(Part("process", write(modality.process)))
    if modality.limit is not None:
        parts.append(Part("limit", write(modality.limit), _at_most(bound.limit) if bound else ""))
    options = {"embeds": False, "cacheable": True, "positions": None, "when": True}
    for name, default in options.items():
        option = getattr(modality, name)
        if option is not default:
            parts.append(Part(name, write(option)))
    return parts


def output_parts(output: Output, names: Names, bound: BoundOutput | None) -> list[Part]:
    """The parts of an output."""
    tokens, form = "", ""
    if bound:
        tokens = f"{plural(bound.num_tokens, 'token')}: {_allowed(bound.allowed)}"
        with suppress(MmkitError):  # of what `decode` reads, as weights, the folder may have none
            form = f"{shape_text(bound.shape)} {bound.dtype}"
    parts = [Part("layout", names.written(output.layout), tokens)]
    for name in ("decode", "encode"):
        if (function := getattr(output, name)) is not None:
            parts.append(Part(name, _source(function), form if name == "decode" else ""))
    return parts


def _allowed(ids: Sequence[Any]) -> str:
    """The ids that may stand at each position of an output."""
    plain = [one.start if isinstance(one, range) and len(one) == 1 else one for one in ids]
    return notation(runs(plain, bytes(len(plain))))


def _form(field: Field) -> str:
    """Shape and dtype of a bound field, as far as they are declared."""
    shape = "" if field.shape is None else shape_text(field.shape)
    return f"{shape} {field.dtype or ''}".strip()


def _at_most(limit: int | None) -> str:
    return "no limit" if limit is None else f"{limit} in one request"


def _layout_value(layout: Layout, names: Names) -> str:
    """A bound layout: its ids where they are known, its formula with the known parts in place where
    they are not."""
    if isinstance(layout, Fixed):
        return notation(runs(layout.ids, layout.mask))
    text = names.written(layout)
    for block in layout.fixed():
        if len(block) > 1:
            source = repr(Fixed(tuple(block.ids), block.mask))
            text = text.replace(source, f"[{notation(runs(block.ids, block.mask))}]")
    return text


def read_values(modality: Modality, scope: Scope) -> dict[str, Any]:
    """The values of what the declaration reads from the config, the processor and the
    vocabulary."""
    known = STATIC - {"kwargs"}  # which are a request's
    static = [leaf.expr for leaf in modality.leaves() if leaf.root in known and leaf.keys]
    values = {}
    for leaf in [*sorted(static, key=repr), *_tokens(modality)]:
        try:
            value = evaluate(leaf, scope)
        except MmkitError:  # in the branch of a where() that this config does not take
            continue
        if not callable(value):
            values[repr(leaf)] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    """A value as data: of a dataclass, as processors have them, what is set; of other objects, what
    they are."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: v for f in fields(value) if (v := getattr(value, f.name)) is not None}
    if value is None or isinstance(value, (bool, int, float, str, list, tuple, dict)):
        return value
    return f"a {type(value).__name__}"


def _is_known(part: Any) -> bool:
    """Whether an expression or a layout has a value once it is bound."""
    return all(leaf.root in STATIC for leaf in leaves(part))


def _tokens(modality: Modality) -> list[Expr]:
    """The tokens of the vocabulary that the layout and the targets name, apart from numbered
    ones."""
    tokens: dict[str, Expr] = {}

    def visit(part: Any) -> None:
        if is_op(part, "tok[]") and _is_known(part):
            tokens[repr(part)] = part
        for inner in parts(part):
            visit(inner)

    for part in (modality.layout, *(update.target for update in modality.update)):
        visit(part)
    return list(tokens.values())
