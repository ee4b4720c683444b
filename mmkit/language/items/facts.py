"""Facts of items: what a caller knows of an item without its content.

Their names are those that expressions read: `item.width` of an `ImageFacts` is its width. The item
types check them: see `ItemType.check_facts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import InputError


class NeedsItem(InputError):
    """A layout reads what an item says; its facts do not tell it."""


@dataclass(frozen=True)
class Facts:
    """Base of the facts of items.

    Attributes:
        size_names: the facts that are sizes, in the order of `ItemType.bounds`.
    """

    size_names: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class TensorFacts(Facts):
    """The facts of a tensor.

    Attributes:
        shape: its shape.
    """

    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TextFacts(Facts):
    """The facts of a text.

    Attributes:
        length: in characters.
    """

    length: int
    size_names: ClassVar[tuple[str, ...]] = ("length",)


@dataclass(frozen=True, kw_only=True)
class ImageFacts(Facts):
    """The facts of an image, as it is seen: the EXIF orientation of a file may exchange its sides.

    Attributes:
        width: in pixels.
        height: in pixels.
    """

    width: int
    height: int
    size_names: ClassVar[tuple[str, ...]] = ("width", "height")


@dataclass(frozen=True, kw_only=True)
class VideoFacts(Facts):
    """The facts of a video.

    Attributes:
        frames: the number of frames that the server takes of it.
        width: of a frame, in pixels.
        height: of a frame, in pixels.
        metadata: as vLLM's loader makes them, for specs that need them.
    """

    frames: int
    width: int
    height: int
    metadata: Mapping[str, Any] | None = None
    size_names: ClassVar[tuple[str, ...]] = ("frames", "width", "height")


@dataclass(frozen=True, kw_only=True)
class AudioFacts(Facts):
    """The facts of audio.

    Attributes:
        length: in samples.
        rate: the sampling rate in Hz; None for the spec's rate.
    """

    length: int
    rate: float | None = None
    size_names: ClassVar[tuple[str, ...]] = ("length",)


@dataclass(frozen=True)
class RecordFacts(Facts):
    """The facts of a record.

    Attributes:
        parts: the facts of every part, by its name. None, or no entry, for an optional part that
            the item leaves out.
    """

    parts: Mapping[str, Facts | None]


@dataclass(frozen=True)
class ListFacts(Facts):
    """The facts of a list.

    Attributes:
        elements: the facts of every element, in order.
    """

    elements: Sequence[Facts]
