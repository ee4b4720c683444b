"""Padding: prompts of several lengths as one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..errors import InputError
from ..plan.plan import Plan


class Padding(NamedTuple):
    """Padding of prompts to one length.

    Attributes:
        token: the padding id.
        side: "left" or "right".
        length: the least length.
        multiple: the length is a multiple of this number.
        is_wanted: False refuses prompts of several lengths.
    """

    token: int
    side: str
    length: int = 0
    multiple: int = 1
    is_wanted: bool = True

    def pad_prompts(
        self, name: str, prompts: Sequence[Sequence[int]], spec: str
    ) -> dict[str, torch.Tensor]:
        """Return prompts as a tensor, with their attention mask.

        Args:
            name: the key of the ids: "input_ids" or "decoder_input_ids".
            prompts: the ids of each prompt.
            spec: the name of the spec, for messages.

        Returns:
            The ids and the mask, int64 (prompts, length), by their keys.

        Raises:
            InputError: prompts of several lengths without padding.
        """
        lengths = {len(ids) for ids in prompts}
        if len(lengths) > 1 and not self.is_wanted:
            got = f"lengths {sorted(lengths)}"
            remedy = "Write padding=True."
            raise InputError(f"{spec}.prompt", "prompts of one length", got, remedy)
        mask_name = name.removesuffix("input_ids") + "attention_mask"
        mask = [[1] * len(ids) for ids in prompts]
        return {name: self.pad_rows(prompts, self.token), mask_name: self.pad_rows(mask, 0)}

    def pad_rows(self, rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
        """Return rows as one int64 (rows, length) tensor, with `value` as padding."""
        lengths = [len(row) for row in rows]
        longest = max([self.length, *lengths])
        width = math.ceil(longest / self.multiple) * self.multiple
        padded: list[list[int]] = []
        for row in rows:
            gap = [value] * (width - len(row))
            if self.side == "left":
                padded.append(gap + list(row))
            else:
                padded.append(list(row) + gap)
        return torch.tensor(padded, dtype=torch.long)


def parse_padding(
    plan: Plan,
    tokenizer: Any,
    padding: bool | str,
    *,
    max_length: int | None = None,
    padding_side: str | None = None,
    pad_to_multiple_of: int | None = None,
) -> Padding:
    """Return the padding that the arguments of a call ask for; see `Processor.__call__`.

    Raises:
        InputError: a value that an argument cannot have, or a length or a multiple for prompts that
            are not padded.
    """
    name = plan.spec.name
    has_length = padding == "max_length" and max_length is not None
    if padding not in (True, False, "longest", "do_not_pad") and not has_length:
        expected = 'a bool, "longest", or "max_length" beside max_length='
        raise InputError(f"{name}.padding", expected, repr(padding))
    if padding_side not in (None, "left", "right"):
        raise InputError(f"{name}.padding_side", '"left" or "right"', repr(padding_side))
    _check_positive(f"{name}.max_length", max_length)
    _check_positive(f"{name}.pad_to_multiple_of", pad_to_multiple_of)
    if max_length is not None and not has_length:
        got = f"padding={padding!r}"
        remedy = "Nothing is cut off, as in a server."
        raise InputError(f"{name}.max_length", 'padding="max_length" beside it', got, remedy)
    is_wanted = padding not in (False, "do_not_pad")
    if pad_to_multiple_of is not None and not is_wanted:
        got = f"padding={padding!r}"
        raise InputError(f"{name}.pad_to_multiple_of", "padding=True beside it", got)
    return Padding(
        token=_choose_padding_id(plan, tokenizer),
        side=str(padding_side or getattr(tokenizer, "padding_side", "right")),
        length=max_length or 0,
        multiple=pad_to_multiple_of or 1,
        is_wanted=is_wanted,
    )


def _check_positive(where: str, value: Any) -> None:
    """Refuse an argument that is neither None nor an integer above 0."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InputError(where, "a number above 0", repr(value))


def _choose_padding_id(plan: Plan, tokenizer: Any) -> int:
    """Return the padding id: the first that is no placeholder.

    Candidates are the tokenizer's id for padding, its end token, and then the ids from 0 on.
    """
    for name in ("pad_token_id", "eos_token_id"):
        token: int | None = getattr(tokenizer, name, None)
        if token is not None and token not in plan.embed_ids:
            return token
    token = 0
    while token in plan.embed_ids:
        token += 1
    return token
