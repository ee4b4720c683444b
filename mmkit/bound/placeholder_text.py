"""The text of an item in a chat message, by the spec's `replace`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..expr import Scope
from ..spec import Declaration
from ..updates import Replace


def placeholder_text(spec: Declaration, modality: str, index: int) -> str | None:
    """The target of `replace` as text: ``<image>`` for ``tok["<image>"]``.

    Args:
        spec: the declaration.
        modality: name of the modality.
        index: the item's position among those of its modality.

    Returns:
        The text; None for another update, for a target that is an id, and for a target that depends
        on more than `item.index`.
    """
    updates = next((m.update for m in spec.modalities if m.name == modality), ())
    replaced = next((update for update in updates if isinstance(update, Replace)), None)
    if replaced is None:
        return None
    texts = _Texts()
    try:
        ids = replaced.target.lay(Scope(tok=texts, item=SimpleNamespace(index=index))).ids
        return "".join(texts.of[token] for token in ids)
    except Exception:  # a function of the author's may raise anything where its scope lacks a value
        return None


class _Texts:
    """In place of a vocabulary: gives every text an id that no tokenizer has."""

    unknown = None

    def __init__(self) -> None:
        self.of: dict[int, str] = {}

    def __getitem__(self, token: Any) -> int:
        template, *values = token if isinstance(token, tuple) else (token,)
        new = 2**40 + len(self.of)
        self.of[new] = template.format(*values) if values else template
        return new

    def text(self, text: str, *values: Any) -> list[int]:
        return [self[text, *values]]
