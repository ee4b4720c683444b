"""Processing: how canonical items become tensors.

Without `process=`, a `Tensor` is the modality's one field, and each part of a `Record` of tensors
is the field of its name. `hf()` calls a Hugging Face processor, or an object that is called like
one. A function can do anything else::

    def patches(items, scope):  # canonical items, in order; a Scope without an item
        parts = [item.unfold(0, 4, 4) for item in items]
        return {
            # a flat field: the items' parts, one after the other
            "patches": torch.cat(parts),
            # a batched field: one part per item, also as a list
            "counts": torch.tensor([len(part) for part in parts]),
        }

In each case, an item's part must not depend on the other items of the request, for example by
padding to the batch: vLLM caches each item alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from .expr import Scope, Value, evaluate, expression, expressions, several
from .node import Part, Stated, evaluate_all, fold, stated, structure


class Identity(Part):
    """Each item is its own field, or each of its parts the field of that name: the default for a
    `Tensor` and for a `Record` of tensors."""

    _word = "identity"


def _sizes(corner: Any) -> tuple[Any, ...]:
    return several(corner if isinstance(corner, tuple) else (corner,))


class HF(Part):
    """Call a Hugging Face processor, or an object that is called like one, once with all items that
    vLLM's cache lacks.

    mmkit ignores outputs that are no declared field. Where the processor raises, mmkit refuses the
    request; where it raises on the spec's largest item too, mmkit refuses the spec.

    Attributes:
        processor: the object to call in place of the checkpoint's processor: a part of it
            (``proc.process``), or, for a model that ships none, one made from the config
            (``later(Tiles)(cfg.tile_size)``, or a function of a `Scope`). mmkit makes it once per
            distinct `mm_processor_kwargs`, and calls it with the items of all modalities that name
            it, as ``(images=..., videos=..., audio=..., return_tensors="pt", **kwargs)``, with
            those arguments that it takes.
        inputs: vLLM's argument name to the processor's: ``{"images": "pixels"}``. vLLM's names are
            `images`, `videos` and `audios` (`audio` by default), for a `Tensor` or a `Text` the
            name of its modality, and for a `Record` the names of its parts.
        outputs: the processor's output name to the field's.
        text: text of one item, for a processor that expects one placeholder per item in a text.
        unpad: field to the sizes of one item's part (a size, or a tuple of sizes, of its leading
            dimensions), for a processor that pads items to the largest of the batch.
        kwargs: arguments of every call: ``{"sampling_rate":
            proc.feature_extractor.sampling_rate}``. A request cannot change them.
        one_by_one: call the processor once per item, where its output for an item depends on the
            other items of the batch, for example by padding.
    """

    processor: Stated[Value, Any] = stated(expression, default=None)
    _: KW_ONLY
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    text: Stated[Value, Any] = stated(expression, default=None)
    unpad: Stated[Mapping[str, Any], Mapping[str, tuple[Any, ...]]] = stated(
        lambda corners: {name: _sizes(corner) for name, corner in corners.items()},
        default_factory=dict,
    )
    kwargs: Stated[Mapping[str, Value], Mapping[str, Any]] = stated(
        expressions, default_factory=dict
    )
    one_by_one: bool = False

    _word = "hf"

    @cached_property
    def key(self) -> Hashable:
        """The identity of the call: modalities with equal keys share one call."""
        return structure((self.processor, self.kwargs, self.text))  # type: ignore[no-any-return]

    def bind(self, scope: Scope) -> HF:
        bound = {"text": fold(self.text, scope), "unpad": fold(self.unpad, scope)}
        return replace(self, **bound, kwargs=evaluate_all(self.kwargs, scope))


identity = Identity
hf = HF


Process: TypeAlias = Identity | HF | Callable[[Sequence[Any], Scope], Mapping[str, Any]]


def unpadded(part: Any, sizes: Sequence[Value], scope: Scope) -> Any:
    """The leading corner of one item's part, without the padding."""
    return part[tuple(slice(int(evaluate(size, scope))) for size in sizes)]
