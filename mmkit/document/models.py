"""The parts of a spec as pydantic models: what a document holds, and its JSON Schema.

A model has the fields of its part of the language, under the same names and with the same defaults.
`PARTS` finds the model of a part. A test compares both with the language.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from ..language import field, layout
from ..language.items import lists, media, optional, record, tensor
from ..language.modality import Modality
from ..language.node import Node
from ..language.policy import INSTRUCTION, Policy
from ..language.spec import Declaration, Output
from .notations import (
    FunctionName,
    HFArguments,
    HFProcessor,
    LayoutSource,
    Value,
    ValueMap,
    Values,
)

VERSION = 1
"""The version of the form, which the key `mmkit` of a document names."""

MAX_PARTS = 64
"""The most modalities, fields, updates or outputs that one part of a document has."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$", max_length=100)]
Dtype = Annotated[str, Field(pattern=r"^[a-z]+\d*(_[a-z0-9]+)*$", max_length=40)]
Words = Annotated[dict[Name, Name], Field(max_length=MAX_PARTS)]


class PartModel(BaseModel):
    """A part of a spec in a document.

    Attributes:
        part: the class of the language.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    part: ClassVar[type[Node]]

    def build(self) -> Any:
        """Return the part of the spec.

        Raises:
            SpecError: mmkit refuses it.
        """
        kind: Any = self.part
        return kind(**self.build_arguments())

    def build_arguments(self) -> dict[str, Any]:
        """Return what the document states of the part; the language has the defaults."""
        arguments: dict[str, Any] = {}
        for name in type(self).model_fields:
            if name in self.model_fields_set and name not in ("type", "mmkit"):
                arguments[name] = _build(getattr(self, name))
        return arguments


def _build(value: Any) -> Any:
    """Return a value with parts of a spec in place of models."""
    if isinstance(value, PartModel):
        return value.build()
    if isinstance(value, list):
        return [_build(element) for element in value]
    if isinstance(value, dict):
        return {name: _build(element) for name, element in value.items()}
    return value


# -- items -----------------------------------------------------------------------------------------


class TensorModel(PartModel):
    part = tensor.Tensor

    type: Literal["Tensor"]
    shape: Values
    dtype: Dtype = "float32"
    bound: Value = None
    largest: Value = None


class TextModel(PartModel):
    part = tensor.Text

    type: Literal["Text"]
    most: Value
    least: Value = 1
    alphabet: Value = None
    largest: Value = None


class ImageModel(PartModel):
    part = media.Image

    type: Literal["Image"]
    largest: Value


class VideoModel(PartModel):
    part = media.Video

    type: Literal["Video"]
    largest: Value
    metadata: bool = False


class AudioModel(PartModel):
    part = media.Audio

    type: Literal["Audio"]
    largest: Value
    rate: Value = None
    most: Value = None
    bound: Value = 8.0
    least: Value = 1


class ListModel(PartModel):
    part = lists.List

    type: Literal["List"]
    element: AnyItem
    most: Value
    least: Value = 1


class OptionalModel(PartModel):
    part = optional.OptionalPart

    type: Literal["optional"]
    item: AnyItem

    def build(self) -> Any:
        """Return the part of a record."""
        return optional.optional(_build(self.item))


class RecordModel(PartModel):
    part = record.Record

    type: Literal["Record"]
    parts: Annotated[dict[Name, AnyPart], Field(min_length=1, max_length=MAX_PARTS)]

    def build(self) -> Any:
        """Return the item type; its parts are its arguments."""
        return record.Record(**_build(self.parts))


AnyItem = Annotated[
    TensorModel | TextModel | ImageModel | VideoModel | AudioModel | RecordModel | ListModel,
    Discriminator("type"),
]

AnyPart = Annotated[
    TensorModel
    | TextModel
    | ImageModel
    | VideoModel
    | AudioModel
    | RecordModel
    | ListModel
    | OptionalModel,
    Discriminator("type"),
]

for _model in (ListModel, OptionalModel, RecordModel):  # each holds others of them
    _model.model_rebuild()


# -- fields ----------------------------------------------------------------------------------------


class FieldModel(PartModel):
    """What all fields have."""

    shape: Values = None
    dtype: Dtype | None = None
    keep_on_cpu: bool = False
    hidden: bool = False


class BatchedModel(FieldModel):
    part = field.Batched

    type: Literal["batched"]


class DerivedModel(FieldModel):
    part = field.Derived

    type: Literal["derived"]
    value: Value


class FlatModel(FieldModel):
    part = field.Flat

    type: Literal["flat"]
    sizes: Value
    value: Value = None
    dim: int = 0


class ConstantModel(FieldModel):
    part = field.Constant

    type: Literal["constant"]
    value: Value


AnyField = Annotated[BatchedModel | DerivedModel | FlatModel | ConstantModel, Discriminator("type")]


# -- updates, prompts and processing ---------------------------------------------------------------


class ReplaceModel(PartModel):
    part = layout.Replace

    type: Literal["replace"]
    target: LayoutSource


class AlreadyExpandedModel(PartModel):
    part = layout.AlreadyExpanded

    type: Literal["already_expanded"]


class InsertModel(PartModel):
    part = layout.Insert

    type: Literal["insert"]
    at: Literal["start"] | None = None
    after: LayoutSource = None


AnyUpdate = Annotated[ReplaceModel | AlreadyExpandedModel | InsertModel, Discriminator("type")]


class EndingWithModel(PartModel):
    part = layout.EndingWith

    type: Literal["ending_with"]
    ids: LayoutSource = Field(default=layout.nothing, json_schema_extra={"default": "nothing"})


class IdentityModel(PartModel):
    part = field.Identity

    type: Literal["identity"]


class HFModel(PartModel):
    part = field.HF

    type: Literal["hf"]
    processor: HFProcessor = None
    inputs: Words = {}
    outputs: Words = {}
    text: Value = None
    unpad: ValueMap = {}
    kwargs: HFArguments = {}
    one_by_one: bool = False


class FunctionModel(PartModel):
    """A function of the items and a Scope, which returns the fields by name."""

    type: Literal["function"]
    name: FunctionName

    def build(self) -> Any:
        """Return the function."""
        return self.name


AnyProcess = Annotated[IdentityModel | HFModel | FunctionModel, Discriminator("type")]


# -- modalities, outputs and specs -----------------------------------------------------------------


def _choose_kind(value: Any) -> str | None:
    """Return which of several forms a value of JSON has: a flag, a source, or a part."""
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, str):
        return "source"
    if isinstance(value, dict):
        return "part"
    return None


class ModalityModel(PartModel):
    part = Modality

    name: Name
    item: AnyItem
    layout: LayoutSource
    update: Annotated[list[AnyUpdate], Field(max_length=MAX_PARTS)]
    fields: Annotated[dict[Name, AnyField], Field(max_length=MAX_PARTS)]
    process: AnyProcess
    limit: Value = None
    embeds: Annotated[
        Annotated[bool, Tag("flag")]
        | Annotated[LayoutSource, Tag("source")]
        | Annotated[FlatModel, Tag("part")],
        Discriminator(_choose_kind),
    ] = False
    cacheable: Value = True
    positions: Values = None
    when: Value = True

    def build(self) -> Modality:
        """Return the modality."""
        arguments = self.build_arguments()
        return Modality(arguments.pop("name"), **arguments)


class OutputModel(PartModel):
    part = Output

    name: Name
    layout: LayoutSource
    decode: FunctionName
    encode: FunctionName = None
    lossy: bool = False
    after: Value = None
    until: Value = None
    most: Value = None


class PolicyModel(PartModel):
    part = Policy

    output: Name
    items: ValueMap
    prompt: Value = INSTRUCTION
    instruction: Value = None
    ignored: Value = ()
    sampling: ValueMap = {"temperature": 0.0}
    metadata: ValueMap = {}


def _choose_outputs(value: Any) -> str | None:
    """Return how the outputs are written: as a list, or as the function that makes them."""
    if isinstance(value, list):
        return "list"
    if isinstance(value, dict):
        return "function"
    return None


AnyOutputs = Annotated[
    Annotated[list[OutputModel], Field(max_length=MAX_PARTS), Tag("list")]
    | Annotated[FunctionModel, Tag("function")],
    Discriminator(_choose_outputs),
]

Rewrite = Annotated[
    Annotated[LayoutSource, Tag("source")] | Annotated[EndingWithModel, Tag("part")],
    Discriminator(_choose_kind),
]


class SpecModel(PartModel):
    part = Declaration

    mmkit: Literal[1] = Field(description="The version of the form.")
    name: Name
    modalities: Annotated[list[ModalityModel], Field(min_length=1, max_length=MAX_PARTS)]
    prompt: Rewrite | None = None
    decoder_prompt: Rewrite | None = None
    tokenization_kwargs: Annotated[
        dict[Name, bool | int | float | str | None], Field(max_length=MAX_PARTS)
    ] = {}
    merges: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    outputs: AnyOutputs = []
    policy: PolicyModel | None = None


MODELS: tuple[type[PartModel], ...] = (
    TensorModel,
    TextModel,
    ImageModel,
    VideoModel,
    AudioModel,
    RecordModel,
    ListModel,
    OptionalModel,
    BatchedModel,
    DerivedModel,
    FlatModel,
    ConstantModel,
    ReplaceModel,
    AlreadyExpandedModel,
    InsertModel,
    EndingWithModel,
    IdentityModel,
    HFModel,
    ModalityModel,
    OutputModel,
    PolicyModel,
    SpecModel,
)
"""The model of each part."""

PARTS: Mapping[type[Node], type[PartModel]] = {model.part: model for model in MODELS}
"""The model of each part of the language that an object stands for."""


def find_model(part: Node) -> type[PartModel] | None:
    """Return the model of a part; None for a part that is written as text, or not at all."""
    if isinstance(part, Declaration):  # a `ModelSpec` is declared above this room
        return SpecModel
    if isinstance(part, media.Image):  # a bound one may be of a subclass
        return ImageModel
    return PARTS.get(type(part))
