"""The vocabulary of a tokenizer, as specs see it."""

from __future__ import annotations

import difflib
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

from .errors import SpecError

logger = logging.getLogger(__name__)

_RESERVED = re.compile(r"[<\[|{].+[>\]|}]")
"""The form of tokens that no ordinary text has."""

_UNDECODED = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers decode for a part of a character."""

_MOST_BYTES = 8
"""Ids of a character that are looked at together."""


class Vocabulary:
    """Read-only view of a Hugging Face tokenizer: the forms of the root `tok`, with values in place
    of expressions. ``v["<image>"]`` is an id, ``v.text("some text")`` a list of ids.

    Args:
        tokenizer: anything with `get_vocab`, `encode(text, add_special_tokens=...)` and `decode`.
            Its special tokens are those of `get_added_vocab` and `all_special_ids`, if it has them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, Sequence[int]] = {}
        self._texts: dict[int, str] = {}
        self._encode = lru_cache(maxsize=1024)(partial(tokenizer.encode, add_special_tokens=False))

    @cached_property
    def _ids(self) -> dict[str, int]:
        # get_vocab() may make the whole table: once per tokenizer, not per lookup
        return self.tokenizer.get_vocab()  # type: ignore[no-any-return]

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids that no ordinary text has: special tokens and other added ones, except those with
        which the tokenizer surrounds every text."""
        added: dict[str, int] = getattr(self.tokenizer, "get_added_vocab", dict)()
        special = {*added.values(), *getattr(self.tokenizer, "all_special_ids", ())}
        return frozenset(special.difference(self.tokenizer.encode("", add_special_tokens=True)))

    @cached_property
    def unknown(self) -> int | None:
        """The id of every text that the vocabulary lacks; None where it lacks none."""
        return getattr(self.tokenizer, "unk_token_id", None)

    def in_texts(self, token: int) -> str | None:
        """How an ordinary text may have an id; None for a special or an added token, a reserved one
        (``<unused1>``), and an id without a token."""
        # those of a config may be a class's defaults
        names = ("bos_token_id", "eos_token_id")
        if token in [getattr(self.tokenizer, name, None) for name in names]:
            return "with which a text begins or ends"
        texts = (text for text, known in self._ids.items() if known == token)
        text = None if token in self.special else next(texts, None)
        return None if text is None or _RESERVED.fullmatch(text) else f"the token {text!r}"

    def __getitem__(self, token: str | tuple[Any, ...]) -> int:
        """The id of one token, or of one that a template names: ``v["<|image_{}|>", 1]``.

        Raises:
            SpecError: the vocabulary lacks it.
        """
        text = filled(*token) if isinstance(token, tuple) else token
        if not isinstance(text, str):
            expected, got = "the text of one token", type(text).__name__
            raise SpecError(f"tok[{text!r}]", expected, got, "Use an id as it is.")
        if text in self._ids:
            return self._ids[text]
        near = difflib.get_close_matches(text, self._ids, n=3)
        hint = f"Near: {', '.join(map(repr, near))}. " if near else ""
        remedy = f"{hint}Use tok.text({text!r}) for a text that the tokenizer splits."
        expected, got = "a token of the vocabulary", "a text that is none"
        raise SpecError(f"tok[{text!r}]", expected, got, remedy)

    def has(self, token: str, *values: Any) -> bool:
        """Whether the vocabulary has this token."""
        return filled(token, *values) in self._ids

    def text(self, text: str, *values: Any) -> list[int]:
        """The ids of a text, encoded without special tokens."""
        text = filled(text, *values)
        return list(self._known.get(text) or self._encode(text))

    def learn(self, texts: Sequence[str]) -> None:
        """Encode several texts in one call of a tokenizer that takes them, for `text`."""
        if texts and callable(self.tokenizer):
            ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            self._known.update(zip(texts, ids, strict=True))

    __contains__ = None  # Python would ask for item after item; `has` answers

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    # -- tokens inside a text ----------------------------------------------------------------------

    def pieces(self, ids: Sequence[int]) -> list[tuple[str, int]]:
        """The text of ids in pieces, each with the number of its ids. A piece is one id, or those
        that make one character together."""
        pieces: list[tuple[str, int]] = []
        parts: list[int] = []  # of a character
        for token in ids:
            text = self._text_of(token)
            if _UNDECODED in text:
                parts.append(token)
                text = self._decoded_inside(parts)
                if len(parts) < _MOST_BYTES and not self._are_whole(parts, text):
                    continue
                pieces.append((text, len(parts)))
            else:
                if parts:
                    pieces.append((self._decoded_inside(parts), len(parts)))
                pieces.append((text, 1))
            parts = []
        if parts:
            pieces.append((self._decoded_inside(parts), len(parts)))
        return pieces

    def simple_text(self, ids: Sequence[int]) -> str | None:
        """The text of ids that are a text each; None where some make a character together."""
        for token in set(ids).difference(self._texts):
            self._text_of(token)
        text = "".join(map(self._texts.__getitem__, ids))
        return None if _UNDECODED in text else text

    def _are_whole(self, parts: list[int], text: str) -> bool:
        """Whether ids are all of a text; the character that stands for what cannot be decoded may
        be in it itself."""
        return _UNDECODED not in text or self._encoded_inside(text) == parts

    def text_of_target(self, target: Sequence[int]) -> str:
        """The text of a target, without the space that the tokenizer writes before every text."""
        text = "".join(piece for piece, _ in self.pieces(target))
        return text.removeprefix(" ") if self._begins_with_space else text

    def inside(self, text: str) -> list[int] | None:
        """The ids of a text that stands inside another one, where no tokenizer writes a space
        before it. None where its beginning merges with whatever stands before it, and for a text
        that was not decoded as a whole."""
        return None if _UNDECODED in text else self._encoded_inside(text)

    def _encoded_inside(self, text: str) -> list[int] | None:
        for before in ("\n", "a", "."):
            lead = self.tokenizer.encode(before, add_special_tokens=False)
            ids: list[int] = self.tokenizer.encode(before + text, add_special_tokens=False)
            if ids[: len(lead)] == lead:
                return ids[len(lead) :]
        return None

    @cached_property
    def _begins_with_space(self) -> bool:
        """Whether the tokenizer writes a space before every text, as that of Llama 2 does."""
        return self.text("a") != self.inside("a")

    def _text_of(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decoded_inside([token])
        return self._texts[token]

    def _decoded_inside(self, ids: list[int]) -> str:
        """The text of ids inside a text: at the beginning of one, tokenizers remove a space."""
        lead = self.text("a")
        try:
            before, text = self.decode(lead), self.decode([*lead, *ids])
            return text.removeprefix(before) if text.startswith(before) else self.decode(ids)
        except Exception:
            # what it cannot decode is part of no target; the request needs the other ids
            logger.warning("the tokenizer cannot decode the ids %s", ids, exc_info=True)
            return ""


def filled(text: str, *values: Any) -> str:
    """A text, or a template with its values in it."""
    return text.format(*values) if values else text


def of_text_config(config: Any, *names: str) -> list[Any]:
    """Attributes of the language model's part of a Hugging Face config, each or None."""
    text = getattr(config, "get_text_config", lambda: config)()
    if isinstance(text, Mapping):
        return [text.get(name) for name in names]
    return [getattr(text, name, None) for name in names]


def vocab_size(config: Any, default: int | None = None) -> int:
    """Number of ids of the language model in a Hugging Face config, or a default.

    Raises:
        SpecError: the config does not state it, and there is no default.
    """
    (stated,) = of_text_config(config, "vocab_size")
    size = default if stated is None else stated
    if not isinstance(size, int):
        raise SpecError("config", "a vocab_size in the language model's part", repr(size))
    if size > sys.maxunicode:  # ids are sought as characters, of which one stands for items
        raise SpecError("config", f"a vocab_size of at most {sys.maxunicode}", str(size))
    return size


def id_text(token: Any) -> str:
    """What stands in place of a token id, for messages."""
    return str(token) if type(token) is int else f"{type(token).__name__} {token!r}"


def check_ids(ids: Sequence[int], size: int, where: str) -> None:
    """Refuse ids of a spec outside a vocabulary of this size.

    Raises:
        SpecError: names the largest.
    """
    if ids and max(ids) >= size:
        remedy = "Use a reserved id inside the vocabulary: vLLM refuses prompts with other ids."
        raise SpecError(where, f"token ids below the vocabulary size {size}", str(max(ids)), remedy)
