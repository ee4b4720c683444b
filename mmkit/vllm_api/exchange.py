"""The exchange of a request's items with vLLM's processor cache.

vLLM's cache has two halves. That of the front end, where requests are processed, says which items
the engine has; that of the engine has their fields. Both evict on their own, so both must see the
same items in the same order: a half that moves alone evicts other items than the other one, and
some later request, of somebody else, names an item that the engine lacks.

So a request that is rendered only looks into the front end's half (`CacheReader`), and each of its
items becomes an `UnsentItem`. The half moves in `exchanged`, when vLLM's client hands the request
to the engine, in the order in which the engine's half will move. A request that is refused, that is
rendered for its length, or whose client leaves has moved nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import MultiModalKwargsItem

from ..language.layout import Placeholder
from ..plan.placement import ItemLayout
from .compat import RELEASES, TOUCHES, find

logger = logging.getLogger(__name__)

_SizedCache: Any = find("multimodal.cache.base:MultiModalCache", "multimodal.cache:MultiModalCache")


@dataclass(eq=False)
class CachedItem:
    """What the front end's half of vLLM's cache keeps of an item.

    Attributes:
        layouts: the layout of the item, and the ways in which it may get into a prompt.
        size: of its fields in the cache, in bytes.
    """

    layouts: ItemLayout
    size: int


@dataclass(eq=False)
class ProcessedItem:
    """An item of a request once it is processed, or found in a cache.

    Attributes:
        item_hash: its key in caches.
        fields: vLLM's form of its fields; None where only a cache has them.
        cached: what the cache keeps of it.
    """

    item_hash: str
    fields: MultiModalKwargsItem | None
    cached: CachedItem


class UnsentItem(MultiModalKwargsItem):
    """An item of a rendered request that vLLM's client has not handed to the engine.

    Attributes:
        item: the item. Its fields are None where the cache had them when the request was rendered.
        modality: its name.
        cache: the front end's half of vLLM's cache.
        process_again: gives the fields, where the cache has dropped the item since; None where
            nobody can.
    """

    def __init__(
        self,
        item: ProcessedItem,
        modality: str,
        cache: Any,
        process_again: Callable[[], MultiModalKwargsItem] | None = None,
    ) -> None:
        # not by vLLM's class, which in 0.11 reads the modality from the fields: there may be none
        UserDict.__init__(self, item.fields.data if item.fields is not None else {})
        self._modality = modality
        self.item, self.cache, self.process_again = item, cache, process_again

    def __deepcopy__(self, memo: Any) -> UnsentItem:
        return self  # nothing writes to it, and a cache has one copy

    def __reduce__(self) -> Any:
        # another process has another cache
        if self.item.fields is None:
            raise TypeError("an item that only vLLM's cache has cannot go to another process")
        return MultiModalKwargsItem, (self.data,)

    @property
    def is_lost(self) -> bool:
        """Whether its fields are nowhere any more, but it can be processed again."""
        if self.item.fields is not None or self.process_again is None:
            return False
        return not self._is_cached

    @property
    def _is_cached(self) -> bool:
        return bool(self.cache.is_cached([self.item.item_hash])[0])

    def restore(self) -> None:
        """Process a lost item again. Where this fails, the engine says that it lacks the item, and
        vLLM ends the request with an error that a client may answer by sending it again."""
        process_again, self.process_again = self.process_again, None
        try:
            self.item.fields = process_again() if process_again else None
        except Exception as error:
            logger.warning("An item left vLLM's cache before its request was sent: %s", error)

    def touch(self) -> None:
        """Tell the cache that the request needs the item."""
        self.cache.touch_sender_cache_item(self.item.item_hash)

    def exchanged(self) -> MultiModalKwargsItem | None:
        """What the engine gets of the item: its fields, None where it has them, or their address
        in shared memory. Moves the front end's half."""
        item = self.item
        if self.is_lost:  # evicted by an item of the same request; before 0.16 nothing is touched
            self.restore()
        if item.fields is None and not self._is_cached:
            return None
        entry = None if item.fields is None else (item.fields, item.cached)
        fields: MultiModalKwargsItem | None
        fields, _ = self.cache.get_and_update_item(entry, item.item_hash)
        self.process_again = None  # which keeps the caller's item in memory
        return fields


class CacheReader:
    """Looks for items in vLLM's processor caches without moving them.

    The layouts of a cached item are needed before the cache moves. They are in the cache, which
    gives them only as it moves, so they are found here by weak references: they are there as long
    as the cache, or a request on its way, keeps them.
    """

    def __init__(self) -> None:
        self._cached: WeakKeyDictionary[Any, WeakValueDictionary[str, CachedItem]]
        self._cached = WeakKeyDictionary()
        self._processed: WeakValueDictionary[str, ProcessedItem] = WeakValueDictionary()

    def find(self, cache: Any, hashes: list[str]) -> list[ProcessedItem | None]:
        """The items that a cache has, or a request that is on its way to the engine; None for
        others."""
        if cache is None:
            return [None] * len(hashes)
        known: Mapping[str, CachedItem] = self._cached.get(cache, {})
        items: list[ProcessedItem | None] = []
        for item_hash, is_cached in zip(hashes, cache.is_cached(hashes), strict=True):
            item = self._processed.get(item_hash)
            if item is None and is_cached and (cached := known.get(item_hash)) is not None:
                item = ProcessedItem(item_hash, None, cached)
            items.append(item)
        return items

    def remember(self, cache: Any, items: Sequence[ProcessedItem]) -> None:
        """Find the processed items of a request from now on."""
        if cache is None:
            return
        cached = self._cached.setdefault(cache, WeakValueDictionary())
        for item in items:
            cached[item.item_hash] = item.cached
            if item.fields is not None:
                self._processed[item.item_hash] = item


def size_of(fields: MultiModalKwargsItem) -> int:
    """The size of an item in vLLM's caches, in bytes."""
    return int(_SizedCache.get_item_size(fields))


def capacity_of(cache: Any) -> float:
    """The most bytes in a cache that evicts the items that were not used for longest."""
    return float(getattr(getattr(cache, "_cache", None), "maxsize", math.inf))


def fields_in(
    cache: Any, items: Mapping[str, Sequence[ProcessedItem]]
) -> dict[str, list[MultiModalKwargsItem]]:
    """The fields of a request's items, after the new ones went into a cache of this process."""
    fields: dict[str, list[Any]] = {name: [None] * len(own) for name, own in items.items()}
    # those that the cache has come first: no new one evicts them then
    for are_new in (False, True):
        for name, of_modality in items.items():
            for index, item in enumerate(of_modality):
                if (item.fields is not None) is are_new:
                    entry = (item.fields, item.cached) if are_new else None
                    fields[name][index], _ = cache.get_and_update_item(entry, item.item_hash)
    return fields


def has_two_halves(cache: Any) -> bool:
    """Whether the engine has a half of a cache."""
    return cache is not None and not isinstance(cache, MultiModalProcessorOnlyCache)


# -- when a request goes to the engine -------------------------------------------------------------


def exchanged(features: Sequence[Any]) -> list[Any]:
    """The items of a request as the engine gets them. Moves the front end's half of the cache.

    Args:
        features: vLLM's, in the order of the prompt.
    """
    unsent = [feature.data for feature in features if isinstance(feature.data, UnsentItem)]
    if TOUCHES:
        # all first, as in the engine's half: none may evict another one of the request
        for item in unsent:
            item.touch()
    # copies: requests for several answers share them
    sent = [
        replace(feature, data=feature.data.exchanged())
        if isinstance(feature.data, UnsentItem)
        else feature
        for feature in features
    ]
    if RELEASES and unsent:
        unsent[0].cache.release_sender_touches()
    return sent


def _lost(features: Sequence[Any]) -> list[UnsentItem]:
    items = [feature.data for feature in features if isinstance(feature.data, UnsentItem)]
    return [item for item in items if item.is_lost]


_NO_LAYOUTS = ItemLayout(Placeholder([], b""), [])


def adopted(features: Sequence[Any], cache: Any) -> list[Any]:
    """The items of a request, of which each takes part in the exchange: also those that no
    processor of ours has made for this cache, such as prompt embeddings.

    Args:
        features: vLLM's.
        cache: the front end's half of vLLM's cache.
    """
    if not has_two_halves(cache):
        return list(features)
    items = []
    for feature in features:
        fields = feature.data
        if not isinstance(fields, UnsentItem):
            # no reader finds this, so that nobody looks at the layouts
            cached = CachedItem(_NO_LAYOUTS, 0 if fields is None else size_of(fields))
            key = getattr(feature, "mm_hash", None) or feature.identifier
            item = ProcessedItem(key, fields, cached)
            feature = replace(feature, data=UnsentItem(item, feature.modality, cache))
        items.append(feature)
    return items


def with_exchange(theirs: Any) -> Any:
    """The step of vLLM's client that hands a request to the engine, with the exchange right before
    it."""

    @wraps(theirs)
    def add_request(self: Any, request: Any) -> Any:
        if request.mm_features:
            request.mm_features = exchanged(request.mm_features)
        return theirs(self, request)

    @wraps(theirs)
    async def add_request_async(self: Any, request: Any) -> Any:
        while lost := _lost(request.mm_features or ()):
            for item in lost:
                await asyncio.to_thread(item.restore)
        # no other request can come between the exchange and the engine: theirs sends before it
        # waits for anything
        if request.mm_features:
            request.mm_features = exchanged(request.mm_features)
        return await theirs(self, request)

    return add_request_async if iscoroutinefunction(theirs) else add_request
