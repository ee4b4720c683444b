"""How values of a spec are written in JSON.

A number, a truth value and null are themselves. Everything else is text: the source of an
expression, of a layout or of a constant, so that the text constant `full` is written ``"'full'"``.

Each `Notation` is the annotation of a field of a pydantic model: it reads JSON when the model is
validated, and writes JSON when a spec becomes a document.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import core_schema

from ..errors import SpecError
from ..language.expr import Expr
from ..language.layout import Layout, layout
from ..language.node import Part, is_equal_declaration, map_values, write_source
from ..language.operations import is_operation
from .functions import FUNCTION_NAME, FunctionReader, FunctionWriter
from .source import LIBRARY, MAX_CHARACTERS, MAX_NUMBER, parse_source


class Notation:
    """One way to write values of a spec in JSON.

    Args:
        parse: returns the value of some JSON. Raises a SpecError for JSON that means none.
        write: returns the JSON of a value. Raises a SpecError for a value that has none.
        schema: the JSON Schema of the form.
    """

    def __init__(
        self,
        parse: Callable[[Any, FunctionReader], Any],
        write: Callable[[Any, FunctionWriter], Any],
        schema: Mapping[str, Any],
    ):
        self.parse = parse
        self.write = write
        self.schema = dict(schema)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Return how pydantic validates a field with this annotation."""
        return core_schema.with_info_plain_validator_function(self._validate)

    def _validate(self, value: Any, info: ValidationInfo) -> Any:
        assert isinstance(info.context, FunctionReader)
        return self.parse(value, info.context)

    def __get_pydantic_json_schema__(
        self, schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the JSON Schema of a field with this annotation."""
        return dict(self.schema)


# -- values ----------------------------------------------------------------------------------------


def parse_value(value: Any, functions: FunctionReader) -> Any:
    """Return the constant or the expression that some JSON means."""
    if isinstance(value, str):
        return parse_source(value, functions)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < MAX_NUMBER:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    expected = "a number, true, false, null, or the source of an expression"
    raise SpecError("", expected, describe_json(value))


def write_value(value: Any, functions: FunctionWriter) -> Any:
    """Return a constant or an expression in JSON."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) in (int, float) and math.isfinite(value):
        return value
    return write_text(value, functions)


def write_text(value: Any, functions: FunctionWriter) -> str:
    """Return the source of a constant, an expression or a layout, with functions by name.

    Raises:
        SpecError: it has none from which it can be read again.
    """
    text = write_source(_name_functions(value, functions))
    again = parse_source(text, FunctionReader(functions.functions))
    if isinstance(value, Layout):
        again = layout(again)
    if not is_equal_declaration(again, value):
        raise SpecError("", "a value that its source tells", text)
    return text


class _FunctionName:
    """A function in an expression that is about to be written.

    Args:
        source: what stands for it in the source of the expression.
    """

    def __init__(self, source: str):
        self._source = source

    def __repr__(self) -> str:
        return self._source


def _name_functions(value: Any, functions: FunctionWriter) -> Any:
    """Return an expression or a layout with the names of its functions in place of them."""

    def name_in(part: Any) -> Any:
        if is_operation(part, "function"):
            (function,) = part._args
            return Expr("function", (_FunctionName(f"function({functions(function)!r})"),))
        if is_operation(part, "later"):
            function, *arguments = part._args
            operands = [map_values(name_in, argument) for argument in arguments]
            return Expr("later", (_name_function(function, functions), *operands))
        if isinstance(part, Expr):
            return Expr(part._op, tuple([map_values(name_in, operand) for operand in part._args]))
        if isinstance(part, Part):
            values = [map_values(name_in, getattr(part, name)) for name in part._names]
            return part._rebuild(values)
        return part

    return map_values(name_in, value)


def _name_function(function: Any, functions: FunctionWriter) -> Any:
    """Return what stands for a function in `later`: itself, if it is one of the library."""
    if _is_of_library(function):
        return function
    return _FunctionName(repr(functions(function)))


def _is_of_library(function: Any) -> bool:
    """Return whether a function is one that every document may call."""
    return any(function is library_function for library_function in LIBRARY.values())


def describe_json(value: Any) -> str:
    """Return the kind of a JSON value, for messages."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "an array"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- several values --------------------------------------------------------------------------------


def _parse_values(value: Any, functions: FunctionReader) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise SpecError("", "an array of sizes", describe_json(value))
    return tuple([parse_value(element, functions) for element in value])


def _write_values(values: Any, functions: FunctionWriter) -> list[Any]:
    return [write_value(value, functions) for value in values]


def _parse_value_map(value: Any, functions: FunctionReader) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SpecError("", "an object of values by name", describe_json(value))
    return {name: parse_value(inner, functions) for name, inner in value.items()}


def _write_value_map(values: Any, functions: FunctionWriter) -> dict[str, Any]:
    return {name: write_value(value, functions) for name, value in values.items()}


# -- layouts, functions, processors ----------------------------------------------------------------


def parse_layout(value: Any, functions: FunctionReader) -> Layout:
    """Return the layout of its source."""
    if not isinstance(value, str):
        raise SpecError("", "the source of a layout", describe_json(value))
    return layout(parse_source(value, functions))


def _parse_function(value: Any, functions: FunctionReader) -> Any:
    if not isinstance(value, str):
        raise SpecError("", "a function as package.module:function", describe_json(value))
    return functions(value)


def _write_function(value: Any, functions: FunctionWriter) -> str:
    return functions(value)


HF_PROCESSORS = (
    "proc",
    "proc.audio_processor",
    "proc.feature_extractor",
    "proc.image_processor",
    "proc.process",
    "proc.tokenizer",
    "proc.video_processor",
)
"""What `hf` calls in a document that names no function: the processor of the checkpoint or a part
of it. Other attributes are methods, of which some write files and some run code of a folder."""


def _parse_processor(value: Any, functions: FunctionReader) -> Any:
    processor = parse_value(value, functions)
    if processor is None or is_operation(processor, "function"):
        return processor
    if is_operation(processor, "later") and not _is_of_library(processor._args[0]):
        return processor
    if isinstance(value, str) and value in HF_PROCESSORS:
        return processor
    expected = f"a processor among {', '.join(HF_PROCESSORS)}, or a function"
    raise SpecError("", expected, describe_json(value))


ITEM_ARGUMENTS = frozenset({"audio", "image", "raw_speech", "sound", "speech", "text", "video"})
"""The arguments by which processors of transformers take items, without an "s" at the end. Of a
text in one of these, they read a file or an address."""

_WORD = re.compile(r"[\w-]*")


def _parse_hf_kwargs(value: Any, functions: FunctionReader) -> dict[str, Any]:
    arguments = _parse_value_map(value, functions)
    for name, argument in arguments.items():
        if name.removesuffix("s") in ITEM_ARGUMENTS or name.endswith("_kwargs"):
            raise SpecError("", "options of the processor", f"{name!r}, by which items come")
        if isinstance(argument, str) and not _WORD.fullmatch(argument):
            raise SpecError("", f"a number or a word for {name}", describe_json(argument))
        if isinstance(argument, (dict, list, tuple)) and _holds_text(argument):
            raise SpecError("", f"numbers for {name}", describe_json(argument))
    return arguments


def _holds_text(value: Any) -> bool:
    """Return whether a container holds a text, apart from the keys of a dict."""
    if isinstance(value, dict):
        return any(_holds_text(inner) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_text(inner) for inner in value)
    return isinstance(value, str)


# -- the notations ---------------------------------------------------------------------------------

SOURCE_SCHEMA = {
    "description": "The source of an expression or of a layout; a text constant is quoted in it.",
    "type": "string",
    "minLength": 1,
    "maxLength": MAX_CHARACTERS,
}
VALUE_SCHEMA = {
    "description": "A constant, or the source of an expression.",
    "type": ["null", "boolean", "number", "string"],
    "minLength": 1,
    "maxLength": MAX_CHARACTERS,
}
_MAP_SCHEMA = {"type": "object", "additionalProperties": VALUE_SCHEMA}

Value = Annotated[Any, Notation(parse_value, write_value, VALUE_SCHEMA)]
"""A constant or an expression."""

Values = Annotated[
    Any, Notation(_parse_values, _write_values, {"type": "array", "items": VALUE_SCHEMA})
]
"""Several, for example the sizes of a shape."""

ValueMap = Annotated[Any, Notation(_parse_value_map, _write_value_map, _MAP_SCHEMA)]
"""Several by name."""

LayoutSource = Annotated[Any, Notation(parse_layout, write_text, SOURCE_SCHEMA)]
"""A layout, or the ids of literal positions."""

FunctionName = Annotated[
    Any,
    Notation(_parse_function, _write_function, {"type": "string", "pattern": f"^{FUNCTION_NAME}$"}),
]
"""A function, by its name."""

HFProcessor = Annotated[Any, Notation(_parse_processor, write_value, VALUE_SCHEMA)]
"""What `hf` calls."""

HFArguments = Annotated[Any, Notation(_parse_hf_kwargs, _write_value_map, _MAP_SCHEMA)]
"""The arguments of every call of `hf`."""


def find_notation(metadata: list[Any]) -> Notation | None:
    """Return the notation among the annotations of a field; None for a field of plain JSON."""
    for annotation in metadata:
        if isinstance(annotation, Notation):
            return annotation
    return None
