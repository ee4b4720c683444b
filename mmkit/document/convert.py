"""A spec to a document, and a document to a spec."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING
from dataclasses import fields as dataclass_fields
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import ValidationError

from ..errors import SpecError, describe_error, locate_errors
from ..language.expr import Expr
from ..language.field import HF
from ..language.items import ItemType
from ..language.items.tensor import Text
from ..language.layout import Layout
from ..language.modality import Modality
from ..language.node import Node, is_equal_declaration
from ..language.operations import is_operation
from ..language.spec import Declaration
from .functions import FunctionReader, Functions, FunctionStubs, FunctionWriter
from .models import VERSION, PartModel, SpecModel, find_model
from .notations import describe_json, find_notation, write_text
from .sentences import explain

D = TypeVar("D", bound=Declaration)

MAX_BYTES = 1 << 20
"""The longest document that is read."""


def to_document(spec: Declaration, *, functions: Functions | None = None) -> dict[str, Any]:
    """Return a spec as a document: an object of JSON, from which `from_document` makes it again.

    Args:
        spec: the declaration.
        functions: names for functions that no process can import.

    Raises:
        SpecError: a part that documents cannot hold, for example a function without a name.
    """
    writer = FunctionWriter(functions)
    where = f"spec {spec.name!r}"
    document = {"mmkit": VERSION, **_write_part(spec, writer, f"{where}, ")}
    again = from_document(document, type(spec), functions=writer.functions, where=where)
    if again != spec:
        raise SpecError(where, "a spec that its source tells", "another one when it is read again")
    return document


def from_document(
    document: str | bytes | Mapping[str, Any],
    kind: type[D],
    *,
    functions: Functions | None = None,
    import_functions: bool = False,
    where: str = "document",
) -> D:
    """Return the spec of a document.

    A document without functions runs no code.

    Args:
        document: JSON, or the object that it holds.
        kind: the class of the spec.
        functions: the functions that the document may name.
        import_functions: import other functions that it names, which runs the code of their
            modules.
        where: names the document in errors.

    Raises:
        SpecError: the document is malformed, its spec cannot work, or it names a function that is
            neither passed nor imported.
    """
    contents: Any = document
    if isinstance(document, (str, bytes)):
        contents = _parse_json(document, where)
    reader = FunctionReader(functions, import_functions=import_functions)
    try:
        model = SpecModel.model_validate(contents, context=reader)
    except ValidationError as error:
        raise explain(error, contents, where) from None
    except RecursionError as error:
        raise SpecError(where, "fewer objects in each other", "more") from error
    with locate_errors(where):
        arguments = model.build_arguments()
        name = arguments.pop("name")
        modalities = arguments.pop("modalities")
        for modality in modalities:
            _check_texts_for_hf(modality)
        return kind(name, *modalities, **arguments)


TEXT_ARGUMENTS = frozenset({"text", "text_pair"})
"""The arguments of transformers' processors that take a text for what it says. Of a text in another
one, such as `images`, they read a file or an address."""


def _check_texts_for_hf(modality: Modality) -> None:
    """Refuse a caller's texts in arguments of a processor that may read files of their names.

    A function of the author knows what it does with a text.

    Raises:
        SpecError: names the argument.
    """
    process = modality.process
    if not isinstance(process, HF) or (
        isinstance(process.processor, Expr) and is_operation(process.processor, "function", "later")
    ):
        return
    types: Mapping[str, ItemType] = modality.item.parts or {modality.name: modality.item}
    for name, item_type in types.items():
        argument = process.inputs.get(name, name)
        has_text = any(isinstance(leaf, Text) for leaf in item_type.leaves())
        if has_text and argument not in TEXT_ARGUMENTS:
            expected = f"a text as {' or '.join(sorted(TEXT_ARGUMENTS))} of a processor"
            remedy = f'Write "inputs": {{"{name}": "text"}}.'
            raise SpecError(f"{modality.name}, process", expected, f"as {argument!r}", remedy)


def describe_item(item_type: ItemType) -> dict[str, Any] | None:
    """Return an item type as a document has it; None for one with a function without a name."""
    try:
        return _write_part(item_type, FunctionWriter(), "item")
    except SpecError:
        return None


def list_functions(
    document: str | bytes | Mapping[str, Any], *, where: str = "document"
) -> list[str]:
    """Return the names of the functions of a document, sorted; none of them is imported.

    Args:
        document: JSON, or the object that it holds.
        where: names the document in errors.

    Raises:
        SpecError: the document is malformed.
    """
    stubs = FunctionStubs()
    from_document(document, Declaration, functions=stubs, where=where)
    return sorted(stubs)


# -- writing ---------------------------------------------------------------------------------------


def _write_part(part: Node, functions: FunctionWriter, where: str) -> dict[str, Any]:
    """Return a part as an object: its type, and what differs from the defaults."""
    model = find_model(part)
    if model is None:
        got = f"a {type(part).__name__}"
        remedy = "MODELS of mmkit.document.models lists them."
        raise SpecError(where, "a part that documents have a model for", got, remedy)
    entries: dict[str, Any] = {}
    if "type" in model.model_fields:
        (entries["type"],) = get_args(model.model_fields["type"].annotation)
    for declared in dataclass_fields(part):  # type: ignore[arg-type]
        value = getattr(part, declared.name)
        default: Any = declared.default
        if declared.default_factory is not MISSING:
            default = declared.default_factory()
        if default is MISSING or not is_equal_declaration(value, default):
            path = _join(where, declared.name)
            entries[declared.name] = _write_argument(model, declared.name, value, functions, path)
    return entries


def _write_argument(
    model: type[PartModel], name: str, value: Any, functions: FunctionWriter, where: str
) -> Any:
    field = model.model_fields.get(name)
    if field is None:
        raise SpecError(where, "an argument that documents know", repr(value))
    notation = find_notation(field.metadata)
    if notation is None:
        return _write(value, functions, where)
    with locate_errors(where):
        return notation.write(value, functions)


def _write(value: Any, functions: FunctionWriter, where: str) -> Any:
    """Return a value whose field has no notation: parts, containers of them, or plain JSON."""
    if isinstance(value, (Expr, Layout)):
        with locate_errors(where):
            return write_text(value, functions)
    if isinstance(value, Node):
        return _write_part(value, functions, where)
    if isinstance(value, (list, tuple)):
        return [_write(inner, functions, f"{where}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, Mapping):
        entries: dict[str, Any] = {}
        for name, inner in value.items():
            entries[name] = _write(inner, functions, _join(where, name))
        return entries
    if callable(value):
        with locate_errors(where):
            return {"type": "function", "name": functions(value)}
    return value


def _join(path: str, name: str) -> str:
    """Return the path of an entry; the spec's path ends in a comma, and its entries follow it."""
    return path + name if path.endswith(" ") else f"{path}.{name}"


# -- reading ---------------------------------------------------------------------------------------


def _parse_json(text: str | bytes, where: str) -> Any:
    """Return the value of a text in JSON, whose names are distinct and whose numbers are finite.

    Raises:
        SpecError: it is none.
    """
    if len(text) > MAX_BYTES:
        raise SpecError(where, f"at most {MAX_BYTES} bytes", str(len(text)))
    try:
        return json.loads(
            text,
            object_pairs_hook=_make_object,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
        )
    except SpecError as error:
        error.prepend(where)
        raise
    except RecursionError as error:
        raise SpecError(where, "fewer values in each other", "more") from error
    except ValueError as error:
        raise SpecError(where, "JSON", describe_error(error)) from error


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise SpecError("", "each name once", f"{describe_json(name)} twice")
        entries[name] = value
    return entries


def _refuse_constant(text: str) -> NoReturn:
    raise SpecError("", "finite numbers", text)


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise SpecError("", "finite numbers", text)
    return number
