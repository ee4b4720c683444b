"""Hashes of items, of which the installed vLLM makes what depends on its version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..plan.hashes import ItemHasher
from .compat import hash_by_vllm


class VllmItemHasher(ItemHasher):
    """Makes the hashes of items by the installed vLLM."""

    def _hash_common_part(self, modality: str, options: Mapping[str, Any]) -> str:
        return self._hash_by_vllm({modality: ""}, options=options)

    def _hash_other_content(self, prefix: str, content: Any) -> str:
        return self._hash_by_vllm({prefix: content})

    def _hash_by_vllm(self, values: Mapping[str, Any], **more: Any) -> str:
        return hash_by_vllm(self._algorithm, model_id=self._model, **values, **more)
