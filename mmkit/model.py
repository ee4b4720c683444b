"""The model side: what a vLLM model class inherits so that its spec holds on the device too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

import torch
from typing_extensions import override

from .errors import MmkitError
from .plan import Plan
from .spec import ModelSpec
from .vllm_api import LAST_PROTOCOL, ModelInterface, check, current_plan, merge_embeddings


def _masked(compute_logits: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """A method that returns logits, with minus infinity for placeholder ids."""

    @wraps(compute_logits)
    def masked(self: MultiModalModel, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        logits = compute_logits(self, *args, **kwargs)
        if logits is not None:  # None on ranks that do not sample
            logits.index_fill_(-1, self._reserved_ids(logits.device), float("-inf"))
        return logits

    return masked


class MultiModalModel(ModelInterface):
    """Mixin for a vLLM model class; put it first among the bases, and decorate the class with `ModelSpec.register`.

    For each modality the class defines ``embed_<modality>(self, **fields)``, which receives the modality's fields as
    vLLM batches them (a batched field is one stacked tensor, or a list where the items' shapes differ; a flat field is
    one concatenated tensor) and returns one (rows, hidden_size) tensor per item, as a list or stacked. In return

    - items and rows are compared with the layout, which vLLM does not do: a surplus row would be cut off silently. The
      device knows the processed fields, not the raw items, so a layout that depends on `item` cannot be compared; write
      ``out.series.shape[0]`` for ``item.length`` where both say the same;
    - an id that the model lacks is embedded as id 0 instead of being read outside the table, so a request that passed
      no processor cannot take the engine down;
    - placeholder ids are never sampled.
    """

    mm_spec: ClassVar[ModelSpec]
    """Set by `ModelSpec.register`."""

    mm_plan: Plan
    """The spec, bound to this model's config and tokenizer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super(LAST_PROTOCOL, self).__init__(*args, **kwargs)
        self.mm_plan = current_plan()

    @override
    def embed_multimodal(self, **kwargs: Any) -> list[torch.Tensor]:
        """Encoder rows of the items whose fields are given, in their order: one (rows, hidden_size) tensor each.

        Raises:
            MmkitError: the encoder returned another number of items or rows than the layout has positions.
        """
        rows: list[torch.Tensor] = []
        for name, modality in self.mm_plan.modalities.items():
            if (embeds := kwargs.get(modality.embeds_field)) is not None:
                rows += list(embeds)
            fields = {key: kwargs[key] for key in modality.fields if kwargs.get(key) is not None}
            if not fields:
                continue
            made = list(getattr(self, f"embed_{name}")(**fields))
            batched = {key: value for key, value in fields.items() if modality.fields[key].kind == "batched"}
            count = len(next(iter(batched.values()), made))
            if len(made) != count:
                remedy = "Return one (rows, hidden_size) tensor per item."
                raise MmkitError(f"{modality.where}, embed_{name}", f"rows for {count} items", str(len(made)), remedy)
            for i, item in enumerate(made):
                wanted = modality.rows({key: value[i] for key, value in batched.items()})
                if wanted is not None and len(item) != wanted:
                    where, remedy = f"{modality.where}, embed_{name}, item {i}", "Return one row per embed() position."
                    raise MmkitError(where, f"{wanted} encoder rows", str(len(item)), remedy)
            rows += made
        return rows

    @override
    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Token embeddings (tokens, hidden_size), with the encoder rows where `is_multimodal` holds.

        What else vLLM may say, as `handle_oov_mm_token` before 0.18, is about ids outside the vocabulary.

        Args:
            input_ids: integers (tokens,); an id outside the vocabulary is embedded as id 0.
            multimodal_embeddings: (rows, hidden_size) tensors, in the order of their positions; None for none.
            is_multimodal: bool (tokens,), as many true as there are rows.
        """
        known = (input_ids >= 0) & (input_ids < self.mm_plan.vocab_size)
        embeds: torch.Tensor = self.get_language_model().embed_input_ids(torch.where(known, input_ids, 0))
        if multimodal_embeddings is None or is_multimodal is None or not len(multimodal_embeddings):
            return embeds
        return merge_embeddings(embeds, multimodal_embeddings, is_multimodal)

    @_masked
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits of the next token, of the class itself or of its language model, with minus infinity for placeholder
        ids. A subclass that defines its own has them masked too.

        Args:
            hidden_states: (tokens, hidden_size), in the model's dtype.

        Returns:
            (tokens, vocabulary size), or None on ranks that do not sample.
        """
        own = getattr(super(), "compute_logits", None)
        logits: torch.Tensor | None = (own or self.get_language_model().compute_logits)(hidden_states)
        return logits

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (own := vars(cls).get("compute_logits")) is not None:
            cls.compute_logits = _masked(own)  # type: ignore[method-assign]

    @property
    def compute_logits_local(self) -> Any:
        """Absent: vLLM would sample from the shards of the head and pass by the mask."""
        raise AttributeError("compute_logits_local")

    def _reserved_ids(self, device: torch.device) -> torch.Tensor:
        reserved = self.__dict__.get("_reserved")
        if reserved is None or reserved.device != device:
            reserved = self.__dict__["_reserved"] = torch.tensor(sorted(self.mm_plan.embed_ids), device=device)
        return reserved


check([MultiModalModel])
