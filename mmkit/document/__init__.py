"""A spec as a document: JSON that says the same, for checkpoints, editors and other programs.

Items, fields, updates and processes are objects with a `type`. Expressions and layouts are text,
their source. `SpecModel` is the pydantic model of it, and docs/data/document.schema.json its JSON
Schema.

A document is data. It runs no code, unless it names functions (``package.module:function``) and its
reader passes these, or says that they may be imported.

This room imports pydantic, so nothing imports it before a document is read or written.

- `convert`: `to_document`, `from_document`;
- `models`: the pydantic models of the parts;
- `notations`: how values are written in JSON;
- `source`: expressions and layouts from their text;
- `functions`: functions by name;
- `sentences`: what pydantic refuses, as errors of mmkit;
- `schema`: the JSON Schema;
- `differences`: what differs between two documents.
"""

from .convert import from_document, list_functions, to_document
from .differences import Difference, find_differences
from .functions import FunctionStubs
from .models import SpecModel
from .schema import build_json_schema

__all__ = ["Difference", "FunctionStubs", "SpecModel", "build_json_schema"]
__all__ += ["find_differences", "from_document", "list_functions", "to_document"]
