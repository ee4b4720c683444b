"""Hashes of items, of which the installed vLLM makes what depends on its version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..plan.hashes import ItemHasher
from .compat import get_hasher_algorithm, hash_by_vllm


class VllmItemHasher(ItemHasher):
    """Makes the hashes of items by the installed vLLM."""

    def _hash_common_part(self, modality: str, options: Mapping[str, Any]) -> str:
        return self._hash_by_vllm({modality: ""}, options=options)

    def _hash_other_content(self, prefix: str, content: Any) -> str:
        return self._hash_by_vllm({prefix: content})

    def _hash_by_vllm(self, values: Mapping[str, Any], **more: Any) -> str:
        return hash_by_vllm(self._algorithm, model_id=self._model, **values, **more)


def make_hasher(info: Any) -> VllmItemHasher:
    """Return the hasher of a model's items, as its engine is configured.

    Args:
        info: vLLM's processing info of the model.
    """
    return VllmItemHasher(get_hasher_algorithm(info.ctx.get_mm_config()), info.model_id)
