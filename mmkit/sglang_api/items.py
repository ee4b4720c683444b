"""The items of a request, from the three lists that SGLang has for media.

SGLang knows images, videos and audio, and no other modality. An item of any modality comes as a
data URL, the one that chat messages of vLLM's server have, in any of the three lists
(`mmkit.wire.items.make_item_url`). Everything else in a list is a medium of the modality of that
name, and SGLang's own loader reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import InputError
from ..language.items import ItemType
from ..language.items.lists import List
from ..language.items.optional import OptionalPart
from ..plan.modality import BoundModality
from ..plan.plan import Plan
from ..wire.items import ITEM_DATA_URL, Decoder, Media, list_embeds_fields, parse_item_url
from ..wire.limits import Limits

LISTS = ("image", "video", "audio")
"""The modalities that SGLang has a list for."""


class LoadMedia(NamedTuple):
    """How SGLang loads media.

    Attributes:
        image: returns an image of PIL for a URL, a path, bytes, base64 or an image.
        audio: returns a mono float array for the same, and a sampling rate in Hz or None.
    """

    image: Callable[[Any], Any]
    audio: Callable[[Any, int | None], Any]


class ItemReader:
    """Reads the items of one request, and counts what they hold.

    Args:
        plan: the bound spec.
        limits: what the items of the request may hold together.
        load: how SGLang loads media.
    """

    def __init__(self, plan: Plan, limits: Limits, load: LoadMedia) -> None:
        self._plan = plan
        self._limits = limits
        self._load = load
        self._decoder = Decoder(limits)
        self._data: dict[str, Any] = {}

    def read_lists(self, lists: Mapping[str, Sequence[Any] | None]) -> dict[str, Any]:
        """Return the items as a caller of vLLM writes them into ``multi_modal_data``.

        Items of one modality have the order of their list; if they stand in several, those of
        images come first, then those of videos.

        Args:
            lists: SGLang's lists by the name of their media; None for an empty one.

        Raises:
            InputError: a malformed URL, or a modality that the model does not have.
            TooLarge: the items are beyond a limit.
        """
        for name in LISTS:
            for index, entry in enumerate(lists.get(name) or ()):
                if entry is not None:
                    self._read_entry(name, entry, f"{name}_data[{index}]")
        return self._data

    def _read_entry(self, list_name: str, entry: Any, where: str) -> None:
        url = _get_url(entry)
        if not url.startswith(ITEM_DATA_URL):
            self._plan.check_names([list_name])
            modality = self._plan.modalities[list_name]
            self._add_raw(modality, self._load_media(list_name, entry, modality.item, where))
            return
        name, raw = parse_item_url(url, self._plan.modalities, where, self._limits)
        modality = self._plan.modalities[name]
        names = list_embeds_fields(modality)
        value = self._decoder.decode_item(raw, where, modality.item, names)
        if isinstance(value, dict) and names[0] in value:
            self._add_embedding(modality, value)
        else:
            self._add_raw(modality, self._load_parts(value, modality.item, where))

    def _add_raw(self, modality: BoundModality, value: Any) -> None:
        items = self._data.setdefault(modality.name, [])
        if isinstance(items, dict):
            _refuse_mixture(modality)
        items.append(value)

    def _add_embedding(self, modality: BoundModality, fields: Mapping[str, Any]) -> None:
        """Add the fields of one precomputed embedding."""
        columns = self._data.setdefault(modality.name, {})
        if isinstance(columns, list):
            _refuse_mixture(modality)
        for name, value in fields.items():
            columns.setdefault(name, []).append(value)

    def _load_parts(self, value: Any, item_type: ItemType, where: str) -> Any:
        """Return an item with its media loaded; a record or a list part by part."""
        if isinstance(item_type, OptionalPart):
            item_type = item_type.item
        if isinstance(value, Media):
            return self._load_media(value.kind, value.url, item_type, where)
        if isinstance(value, dict):
            parts = {}
            for name, part in value.items():
                parts[name] = self._load_parts(part, item_type.parts[name], f"{where}.{name}")
            return parts
        if isinstance(value, list) and isinstance(item_type, List):
            elements = []
            for position, element in enumerate(value):
                path = f"{where}[{position}]"
                elements.append(self._load_parts(element, item_type.element, path))
            return elements
        return value

    def _load_media(self, kind: str, source: Any, item_type: ItemType, where: str) -> Any:
        if kind == "image":
            return self._load.image(source)
        if kind == "audio":
            rate = getattr(item_type, "rate", None)
            if rate is None:
                return self._load.audio(source, None)
            return self._load.audio(source, int(rate)), rate
        expected = "the frames of a video as an item of the modality"
        remedy = "Decode it, and send mmkit.sglang_api.make_item_url of the frames."
        raise InputError(where, expected, "the file of a video", remedy)


def _get_url(entry: Any) -> str:
    """Return the URL of an entry of a list; empty for something else."""
    if isinstance(entry, dict):
        entry = entry.get("url")
    entry = getattr(entry, "url", entry)  # SGLang's `ImageData` of a chat message
    if isinstance(entry, str):
        return entry
    return ""


def _refuse_mixture(modality: BoundModality) -> None:
    expected = "raw items or precomputed embeddings"
    raise InputError(modality.where, expected, "both in one request")
