"""The JSON Schema of documents, described by the docstrings of the language."""

from __future__ import annotations

import inspect
import re
from typing import Any

from .models import MODELS, VERSION, FunctionModel, SpecModel
from .notations import SOURCE_SCHEMA, VALUE_SCHEMA


def build_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a document."""
    schema: dict[str, Any] = SpecModel.model_json_schema()
    for model in MODELS:
        definition = schema
        if model is not SpecModel:
            definition = schema["$defs"][model.__name__]
        _describe(definition, model.part)
    schema["$defs"][FunctionModel.__name__]["title"] = "function"
    schema = _share(schema, {"Source": SOURCE_SCHEMA, "Value": VALUE_SCHEMA})
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = f"A spec of mmkit as a document, version {VERSION}"
    return schema


def build_item_schema() -> dict[str, Any]:
    """Return the JSON Schema of an item type of a document, in one piece.

    Of an item type inside another one of its class, only the type is stated.
    """
    schema = build_json_schema()
    definitions = schema["$defs"]

    def inline(part: Any, open_names: tuple[str, ...] = ()) -> Any:
        if isinstance(part, list):
            return [inline(element, open_names) for element in part]
        if not isinstance(part, dict):
            return part
        entries: dict[str, Any] = {}
        for key, value in part.items():
            if key not in ("discriminator", "$ref"):
                entries[key] = inline(value, open_names)
        reference = part.get("$ref")
        if reference is None:
            return entries
        name = reference.rpartition("/")[2]
        if name in open_names:
            kind = definitions[name]["properties"]["type"]
            return {"type": "object", "properties": {"type": kind}, "required": ["type"]} | entries
        definition: dict[str, Any] = inline(definitions[name], (*open_names, name))
        return definition | entries

    item_schema: dict[str, Any] = inline(definitions["ModalityModel"]["properties"]["item"])
    return item_schema


def _share(schema: dict[str, Any], definitions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a schema with references in place of what comes again and again."""

    def refer(part: Any) -> Any:
        if isinstance(part, list):
            return [refer(element) for element in part]
        if not isinstance(part, dict):
            return part
        for name, definition in definitions.items():
            if definition.items() <= part.items():
                others = {key: value for key, value in part.items() if key not in definition}
                return {"$ref": f"#/$defs/{name}", **others}
        return {key: refer(value) for key, value in part.items()}

    shared: dict[str, Any] = refer(schema)
    shared["$defs"] |= definitions
    return shared


def _describe(definition: dict[str, Any], part: type) -> None:
    """Write the docstring of a part of the language into its definition."""
    summary, attributes = _parse_docstring(inspect.getdoc(part) or "")
    definition["title"] = getattr(part, "_word", "") or part.__name__
    definition["description"] = summary
    for kind in part.__mro__[1:]:  # a field has the attributes of all fields
        _, inherited = _parse_docstring(inspect.cleandoc(kind.__doc__ or ""))
        attributes = inherited | attributes
    for name, property_schema in definition["properties"].items():
        property_schema.pop("title", None)
        if property_schema.get("default", "") is None:
            del property_schema["default"]  # what is left out; not always a value of the form
        if name in attributes:
            property_schema["description"] = attributes[name]


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the descriptions of its attributes."""
    summary = " ".join(text.split("\n\n")[0].split())
    attributes: dict[str, str] = {}
    section = re.search(r"(?ms)^Attributes:\n(.*?)(?=^\S|\Z)", text)
    if section is None:
        return summary, attributes
    for entry in re.finditer(r"(?ms)^    (\w+): (.*?)(?=^    \w|\Z)", section[1]):
        attributes[entry[1]] = " ".join(entry[2].split())
    return summary, attributes
