"""The vocabulary of a tokenizer, as specs see it."""

from __future__ import annotations

import difflib
import logging
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import groupby, pairwise
from reprlib import repr as brief
from string import Formatter
from typing import Any, NamedTuple

from ..errors import InputError, SpecError

logger = logging.getLogger(__name__)

_RESERVED = re.compile(r"[<\[|{].+[>\]|}]")
"""The form of tokens that no ordinary text has."""

_UNDECODED = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers decode for a part of a character."""

_MOST_BYTES = 8
"""Ids of a character that are looked at together."""


class AuthorText(str):
    """A text that the author of a spec has stated, as a value of a template: unlike that of a
    caller, it may spell special tokens."""

    __slots__ = ()


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

    @cached_property
    def makes_unknown(self) -> bool:
        """Whether the tokenizer makes the unknown token of texts; one that falls back to bytes, of
        which it knows all, does not."""
        # a drawing and a letter that few vocabularies have
        rare = "\N{SNOWMAN}\N{CUNEIFORM SIGN A}"
        return self.unknown in self.tokenizer.encode(rare, add_special_tokens=False)

    def in_texts(self, token: int) -> str | None:
        """How an ordinary text may have an id; None for a special or an added token, a reserved one
        (``<unused1>``), and an id without a token."""
        # those of a config may be a class's defaults
        names = ("bos_token_id", "eos_token_id")
        if token in [getattr(self.tokenizer, name, None) for name in names]:
            return "with which a text begins or ends"
        if token == self.unknown and self.makes_unknown:
            return "which stands for every text that the tokenizer does not know"
        texts = (text for text, known in self._ids.items() if known == token)
        text = None if token in self.special else next(texts, None)
        return None if text is None or _RESERVED.fullmatch(text) else f"the token {text!r}"

    def texts(self, tokens: Collection[int]) -> list[str]:
        """The texts of some tokens; an id without a token has none."""
        return [text for text, token in self._ids.items() if token in tokens]

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
        """The ids of a text, or of a template with its values, without the special tokens with
        which the tokenizer surrounds texts.

        Special tokens that the text spells become these tokens. A value that is a string is encoded
        as plain text: no special token comes out of it, nor out of it together with what stands
        beside it. Where it spells none, the ids are the tokenizer's for the filled template.

        Raises:
            InputError: the tokenizer makes a special token of a value all the same, for example of
                one that differs from the token's text in the case of a letter.
        """
        if any(map(_is_plain, values)):
            return self._text_with_plain_values(text, values)
        text = filled(text, *values)
        return list(self._known.get(text) or self._encode(text))

    def _text_with_plain_values(self, template: str, values: Sequence[Any]) -> list[int]:
        parts = _parts(template, values)
        ids: list[int] = []
        for text in self._cut(parts):
            ids += self._encode(text)
        stated: list[int] = []
        for part in parts:
            if not part.is_plain:
                stated += self._encode(part.text)
        if self._special_among(ids) != self._special_among(stated):
            text = "".join(part.text for part in parts)
            expected = "values that the tokenizer takes for plain text"
            got = f"{brief(text)}, in which it finds a special token"
            raise InputError(f"tok.text({template!r})", expected, got)
        return ids

    def _cut(self, parts: Sequence[_Part]) -> list[str]:
        """Cut a filled template inside each special token that has a part in a value: a tokenizer
        finds a special token in one text only."""
        text, values = "", list[tuple[int, int]]()
        for part in parts:
            if part.is_plain:
                values.append((len(text), len(text) + len(part.text)))
            text += part.text
        cuts = {0, len(text)}
        for found in self._special_pattern.finditer(text):
            begin, end = found.span(1)
            for first, last in values:
                if begin < last and first < end:
                    cuts.add(max(begin + 1, first))
        return [text[begin:end] for begin, end in pairwise(sorted(cuts))]

    def _special_among(self, ids: Sequence[int]) -> list[int]:
        """The special tokens among ids. The unknown token stands for other texts, too."""
        special = self.special_texts.values()
        return [token for token in ids if token in special and token != self.unknown]

    @cached_property
    def special_texts(self) -> dict[str, int]:
        """The special tokens by their texts: what the tokenizer marks as special, and added tokens
        of the form that no ordinary text has. Added words are ordinary."""
        marked = {*getattr(self.tokenizer, "all_special_ids", ())}
        for token, added in getattr(self.tokenizer, "added_tokens_decoder", {}).items():
            if getattr(added, "special", False):
                marked.add(token)
        texts = {text: token for text, token in self._ids.items() if token in marked}
        for text, token in getattr(self.tokenizer, "get_added_vocab", dict)().items():
            if token in marked or _RESERVED.fullmatch(text):
                texts[text] = token
        return texts

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """Finds, at every position of a text, the longest special token that begins there. The
        lookahead lets the next match begin inside this one."""
        longest_first = sorted(filter(None, self.special_texts), key=len, reverse=True)
        # nothing matches the empty class
        alternatives = "|".join(map(re.escape, longest_first)) or r"[^\s\S]"
        return re.compile(f"(?=({alternatives}))")

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


class _Part(NamedTuple):
    """A part of a filled template, and whether it is encoded as plain text."""

    text: str
    is_plain: bool


def _is_plain(value: Any) -> bool:
    """Whether a value of a template may be a caller's text. A number is none: it spells what the
    template around it was written for, as in ``<|image_{}|>``."""
    return isinstance(value, str) and not isinstance(value, AuthorText)


def _parts(template: str, values: Sequence[Any]) -> list[_Part]:
    """The parts of a filled template, in order: of the author, and of values that are encoded as
    plain text. Neighbours of one kind are one part."""
    formatter, position = Formatter(), 0
    parts: list[_Part] = []
    for literal, name, spec, conversion in formatter.parse(template):
        parts.append(_Part(literal, False))
        if name is None:
            continue
        if not name or name[0] in ".[":
            name = f"{position}{name}"
            position += 1
        value, _ = formatter.get_field(name, values, {})
        if "{" in (spec or ""):
            expected = "a template without a field inside a format specification"
            remedy = "Write the width as a number."
            raise SpecError(f"tok.text({template!r})", expected, repr(spec), remedy)
        text = formatter.format_field(formatter.convert_field(value, conversion), spec or "")
        parts.append(_Part(text, _is_plain(value)))
    merged: list[_Part] = []
    for is_plain, neighbours in groupby(parts, key=lambda part: part.is_plain):
        merged.append(_Part("".join(part.text for part in neighbours), is_plain))
    return merged


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
