"""The exchange of a request's items with vLLM's processor cache.

vLLM's cache has two halves. The half of the front end, where requests are processed, says which
items the engine has; the half of the engine has their fields. Both evict independently, so both
must see the same items in the same order: a half that moves without the other one evicts other
items, and a later request, of another client, names an item that the engine lacks.

So a request that is rendered only looks into the front end's half (`CacheReader`), and an
`UnsentItem` stands for the fields of each of its items. The half moves in `exchange_features`, when
vLLM's client hands the request to the engine, in the order in which the engine's half will move. A
request that is refused, that is rendered for its length, or whose client leaves has moved nothing.
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

from ..language.layout import ItemTokens
from ..plan.item import Item
from ..plan.placement import ItemLayout
from .compat import RELEASES, TOUCHES, find

logger = logging.getLogger(__name__)

CACHE_METHODS = {
    "is_cached",
    "touch_sender_cache_item",
    "get_and_update_item",
    "release_sender_touches",
}
"""The methods of vLLM's cache by which vLLM's own processor exchanges the items of a request. This
module calls all of them."""

_SizedCache: Any = find("multimodal.cache.base:MultiModalCache", "multimodal.cache:MultiModalCache")


@dataclass(eq=False)
class CacheEntry:
    """What vLLM's cache keeps of an item beside its fields.

    The cache holds it where it expects the prompt updates of the item: as the second value of the
    pair for `get_and_update_item`.

    Attributes:
        layout: what the item becomes in a prompt.
        size: the size of the fields in the cache, in bytes.
    """

    layout: ItemLayout
    size: int


def make_entry(item: Item) -> CacheEntry:
    """Return what a cache keeps of a processed item."""
    return CacheEntry(item.layout, compute_size(item.engine_fields))


def compute_size(fields: MultiModalKwargsItem) -> int:
    """Return the size of the fields of an item in vLLM's caches, in bytes."""
    return int(_SizedCache.get_item_size(fields))


def find_capacity(cache: Any) -> float:
    """Return the most bytes in a cache that evicts the items that were not used for longest."""
    return float(getattr(getattr(cache, "_cache", None), "maxsize", math.inf))


def has_two_halves(cache: Any) -> bool:
    """Return whether the engine has a half of a cache."""
    return cache is not None and not isinstance(cache, MultiModalProcessorOnlyCache)


# -- when a request is rendered --------------------------------------------------------------------


class UnsentItem(MultiModalKwargsItem):
    """The fields of an item that vLLM's client has not handed to the engine.

    Attributes:
        item_hash: its key in caches.
        fields: vLLM's form of its fields; None where the cache had them when the request was
            rendered.
        entry: what the cache keeps beside the fields.
        cache: the front end's half of vLLM's cache.
        process_again: returns the fields, where the cache has dropped the item since; None where
            they cannot be made again.
    """

    def __init__(
        self,
        modality: str,
        item_hash: str,
        fields: MultiModalKwargsItem | None,
        entry: CacheEntry,
        cache: Any,
        process_again: Callable[[], MultiModalKwargsItem] | None = None,
    ) -> None:
        # not by the constructor of vLLM's class, which in 0.11 reads the modality from the fields:
        # there may be none
        UserDict.__init__(self, {} if fields is None else fields.data)
        self._modality = modality  # where vLLM 0.11 looks for it
        self.item_hash = item_hash
        self.fields = fields
        self.entry = entry
        self.cache = cache
        self.process_again = process_again

    def __deepcopy__(self, memo: Any) -> UnsentItem:
        return self  # nothing writes to it, and a cache has one copy

    def __reduce__(self) -> Any:
        # another process has another cache
        if self.fields is None:
            raise TypeError("an item that only vLLM's cache has cannot go to another process")
        return MultiModalKwargsItem, (self.data,)

    @property
    def is_lost(self) -> bool:
        """Whether its fields are nowhere any more, but it can be processed again."""
        if self.fields is not None or self.process_again is None:
            return False
        return not self._is_cached

    @property
    def _is_cached(self) -> bool:
        return bool(self.cache.is_cached([self.item_hash])[0])

    def restore(self) -> None:
        """Process a lost item again.

        Where this fails, the engine says that it lacks the item, and vLLM ends the request with an
        error that a client may answer by sending it again.
        """
        process_again = self.process_again
        self.process_again = None
        if process_again is None:
            return
        try:
            self.fields = process_again()
        except Exception as error:
            logger.warning("An item left vLLM's cache before its request was sent: %s", error)

    def touch(self) -> None:
        """Tell the cache that the request needs the item."""
        self.cache.touch_sender_cache_item(self.item_hash)

    def exchange(self) -> MultiModalKwargsItem | None:
        """Update the front end's half of the cache, and return what the engine receives.

        This is the fields of the item, their address in shared memory, or None where the engine
        has the fields.
        """
        if self.is_lost:  # evicted by an item of the same request; before 0.16 nothing is touched
            self.restore()
        if self.fields is None and not self._is_cached:
            return None
        new_entry = None if self.fields is None else (self.fields, self.entry)
        fields: MultiModalKwargsItem | None
        fields, _ = self.cache.get_and_update_item(new_entry, self.item_hash)
        self.process_again = None  # which keeps the caller's item in memory
        return fields


class CacheReader:
    """Looks for items in vLLM's processor caches without moving them.

    The layout of a cached item is needed before the cache moves. The cache has it, but returns it
    only as it moves. So it is found here by a weak reference, which lives as long as the cache
    keeps the entry, or a request on its way does.
    """

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[Any, WeakValueDictionary[str, CacheEntry]]
        self._entries = WeakKeyDictionary()
        self._unsent: WeakValueDictionary[str, UnsentItem] = WeakValueDictionary()

    def fill_in_from_cache(self, cache: Any, items: Sequence[Item]) -> None:
        """Fill in the layouts of the items that a cache or an unsent request has.

        An item of a request that is on its way to the engine also gets its fields in vLLM's form.
        """
        entries: Mapping[str, CacheEntry] = self._entries.get(cache, {})
        are_cached = cache.is_cached([item.hash for item in items])
        for item, is_cached in zip(items, are_cached, strict=True):
            unsent = self._unsent.get(item.hash)
            if unsent is not None:
                item.engine_fields = unsent.fields
                item.cache_entry = unsent.entry
            elif is_cached:
                # None if no processor of a spec has put the item there (`adopt_features`): then it
                # is processed again
                item.cache_entry = entries.get(item.hash)
            if item.cache_entry is not None:
                item.layout = item.cache_entry.layout

    def remember_entries(self, cache: Any, items: Sequence[Item]) -> None:
        """Make the entries of new items findable, as long as the cache keeps them.

        The other items were found by entries that are remembered already.
        """
        entries = self._entries.get(cache)
        if entries is None:
            entries = self._entries[cache] = WeakValueDictionary()
        for item in items:
            if item.engine_fields is not None:
                entries[item.hash] = item.cache_entry

    def remember_unsent(self, items: Sequence[Item]) -> None:
        """Make the fields of items findable, as long as their request is on its way."""
        for item in items:
            if item.engine_fields.fields is not None:
                self._unsent[item.hash] = item.engine_fields


def update_local_cache(cache: Any, items: Sequence[Item]) -> None:
    """Put new items into a cache of this process, and fill in the fields of the others.

    Those that the cache has come first: no new one evicts them then.
    """
    new_items: list[Item] = []
    for item in items:
        if item.engine_fields is None:
            item.engine_fields, _ = cache.get_and_update_item(None, item.hash)
        else:
            new_items.append(item)
    for item in new_items:
        new_entry = (item.engine_fields, item.cache_entry)
        item.engine_fields, _ = cache.get_and_update_item(new_entry, item.hash)


# -- when a request goes to the engine -------------------------------------------------------------


def exchange_features(features: Sequence[Any]) -> list[Any]:
    """Update the front end's half of the cache with the items of a request.

    Return the items as the engine receives them.

    Args:
        features: vLLM's, in the order of the prompt.
    """
    unsent_items = _find_unsent_items(features)
    if TOUCHES:
        # all first, as in the engine's half: none may evict another one of the request
        for item in unsent_items:
            item.touch()
    exchanged_features = []
    for feature in features:
        if isinstance(feature.data, UnsentItem):
            # a copy: requests for several answers share the feature
            feature = replace(feature, data=feature.data.exchange())
        exchanged_features.append(feature)
    if RELEASES and unsent_items:
        unsent_items[0].cache.release_sender_touches()
    return exchanged_features


def _find_unsent_items(features: Sequence[Any]) -> list[UnsentItem]:
    return [feature.data for feature in features if isinstance(feature.data, UnsentItem)]


def _find_lost_items(features: Sequence[Any]) -> list[UnsentItem]:
    return [item for item in _find_unsent_items(features) if item.is_lost]


# no ids, no mask, and no updates
_NO_LAYOUT = ItemLayout(ItemTokens([], b""), [])


def adopt_features(features: Sequence[Any], cache: Any) -> list[Any]:
    """Return the items of a request, each with an `UnsentItem` for the exchange.

    Items have one already if our processor made them for this cache. Others get one here, for
    example items that another host has processed.

    Args:
        features: vLLM's.
        cache: the front end's half of vLLM's cache.
    """
    if not has_two_halves(cache):
        return list(features)
    adopted_features = []
    for feature in features:
        fields = feature.data
        if not isinstance(fields, UnsentItem):
            # no reader finds this entry, so that its layout is never used
            size = 0 if fields is None else compute_size(fields)
            item_hash = getattr(feature, "mm_hash", None) or feature.identifier
            entry = CacheEntry(_NO_LAYOUT, size)
            unsent = UnsentItem(feature.modality, item_hash, fields, entry, cache)
            feature = replace(feature, data=unsent)
        adopted_features.append(feature)
    return adopted_features


def wrap_add_request(add_request: Any) -> Any:
    """Make vLLM's client exchange items with the cache right before it sends a request."""

    @wraps(add_request)
    def exchange_and_add(self: Any, request: Any) -> Any:
        if request.mm_features:
            request.mm_features = exchange_features(request.mm_features)
        return add_request(self, request)

    @wraps(add_request)
    async def exchange_and_add_async(self: Any, request: Any) -> Any:
        lost_items = _find_lost_items(request.mm_features or ())
        while lost_items:
            for item in lost_items:
                await asyncio.to_thread(item.restore)
            lost_items = _find_lost_items(request.mm_features)
        # no other request can come between the exchange and the engine: vLLM's step sends before
        # it waits for anything
        if request.mm_features:
            request.mm_features = exchange_features(request.mm_features)
        return await add_request(self, request)

    return exchange_and_add_async if iscoroutinefunction(add_request) else exchange_and_add
