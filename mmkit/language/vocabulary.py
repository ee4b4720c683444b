"""The vocabulary of a tokenizer, as specs see it.

The file in its order: `Vocabulary`, with lookups, encoding and decoding; templates; and what is
read from a config or checked about ids.
"""

from __future__ import annotations

import difflib
import logging
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from reprlib import repr as brief
from string import Formatter
from typing import Any, NamedTuple

from ..errors import InputError, SpecError

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""The files of a checkpoint of which one at least is there if it has a tokenizer."""

_RESERVED = re.compile(r"[<\[|{].+[>\]|}]")
"""The form of tokens that no ordinary text has."""

_UNDECODED = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers decode for a part of a character."""

MAX_CHARACTER_IDS = 8
"""The ids that may make one character together: more than the bytes of any."""


MAX_CACHED_TEXT = 1024
"""The characters of the longest text whose ids are cached: callers send longer ones."""


class AuthorText(str):
    """A text of the author of a spec, as a value of a template.

    Unlike that of a caller, it may spell special tokens.
    """

    __slots__ = ()


class Vocabulary:
    """Read-only view of a Hugging Face tokenizer.

    It has the forms of the root `tok`, with values in place of expressions: ``v["<image>"]`` is an
    id, ``v.text("some text")`` a list of ids.

    Args:
        tokenizer: anything with `get_vocab`, `encode(text, add_special_tokens=...)` and `decode`.
            Its special tokens are those of `get_added_vocab` and `all_special_ids`, if it has them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # the ids of texts that were encoded together; see `learn`
        self._learned_ids: dict[str, Sequence[int]] = {}
        # the texts of single ids
        self._texts: dict[int, str] = {}

        @lru_cache(maxsize=1024)
        def encode(text: str) -> list[int]:
            return self._encode_uncached(text)

        self._encode_cached = encode

    # -- lookups -----------------------------------------------------------------------------------

    @cached_property
    def _ids(self) -> dict[str, int]:
        # get_vocab() may make the whole table: once per tokenizer, not per lookup
        return self.tokenizer.get_vocab()  # type: ignore[no-any-return]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that no ordinary text has: special tokens and other added ones.

        Those with which the tokenizer surrounds every text are not among them.
        """
        ids = set(self._added_ids.values())
        ids.update(getattr(self.tokenizer, "all_special_ids", ()))
        surrounding = self.tokenizer.encode("", add_special_tokens=True)
        return frozenset(ids.difference(surrounding))

    @cached_property
    def _added_ids(self) -> dict[str, int]:
        if not hasattr(self.tokenizer, "get_added_vocab"):
            return {}
        return self.tokenizer.get_added_vocab()  # type: ignore[no-any-return]

    @cached_property
    def unknown_id(self) -> int | None:
        """The id of every text that the vocabulary lacks; None where it lacks none."""
        return getattr(self.tokenizer, "unk_token_id", None)

    @cached_property
    def encodes_unknown(self) -> bool:
        """Whether the tokenizer encodes texts that it lacks as the unknown token.

        One that falls back to bytes, of which it knows all, does not.
        """
        # a drawing and a letter that few vocabularies have
        rare = "\N{SNOWMAN}\N{CUNEIFORM SIGN A}"
        return self.unknown_id in self.tokenizer.encode(rare, add_special_tokens=False)

    def explain_in_texts(self, token: int) -> str | None:
        """Explain how an ordinary text may have an id.

        Returns:
            The end of a sentence about the id; None for a special or an added token, a reserved one
            (``<unused1>``), and an id without a token.
        """
        # not the ids of the config, which may be a class's defaults
        for name in ("bos_token_id", "eos_token_id"):
            if token == getattr(self.tokenizer, name, None):
                return "with which a text begins or ends"
        if token == self.unknown_id and self.encodes_unknown:
            return "which stands for every text that the tokenizer does not know"
        if token in self.special_ids:
            return None
        for text, text_id in self._ids.items():
            if text_id == token:
                if _RESERVED.fullmatch(text):
                    return None
                return f"the token {text!r}"
        return None

    def find_texts(self, tokens: Collection[int]) -> list[str]:
        """Find the texts of ids; an id without a token has none."""
        return [text for text, token in self._ids.items() if token in tokens]

    def __getitem__(self, token: str | tuple[Any, ...]) -> int:
        """Return the id of one token, or of one that a template names: ``v["<|image_{}|>", 1]``.

        Raises:
            SpecError: the vocabulary lacks it.
        """
        if isinstance(token, tuple):
            text = fill_template(*token)
        else:
            text = token
        if not isinstance(text, str):
            expected, got = "the text of one token", type(text).__name__
            raise SpecError(f"tok[{text!r}]", expected, got, "Use an id as it is.")
        if text in self._ids:
            return self._ids[text]
        remedy = f"Use tok.text({text!r}) for a text that the tokenizer splits."
        near = difflib.get_close_matches(text, self._ids, n=3)
        if near:
            remedy = f"Near: {', '.join([repr(match) for match in near])}. {remedy}"
        expected, got = "a token of the vocabulary", "a text that is none"
        raise SpecError(f"tok[{text!r}]", expected, got, remedy)

    def has(self, token: str, *values: Any) -> bool:
        """Return whether the vocabulary has this token."""
        return fill_template(token, *values) in self._ids

    __contains__ = None  # Python would ask for item after item; `has` answers

    # -- encoding ----------------------------------------------------------------------------------

    def text(self, text: str, *values: Any) -> list[int]:
        """Return the ids of a text, or of a template with its values.

        The special tokens with which the tokenizer surrounds texts are left out.

        Special tokens that the text spells become these tokens. A value that is a string is encoded
        as plain text: no special token comes out of it, nor out of it together with what stands
        beside it. Where it spells none, the ids are the tokenizer's for the filled template.

        Raises:
            InputError: the tokenizer makes a special token of a value all the same, for example of
                one that differs from the token's text in the case of a letter.
        """
        if any(is_text_of_caller(value) for value in values):
            return self._encode_plain_values(text, values)
        text = fill_template(text, *values)
        return list(self._learned_ids.get(text) or self._encode(text))

    def _encode_plain_values(self, template: str, values: Sequence[Any]) -> list[int]:
        parts = _split_template(template, values)
        ids: list[int] = []
        for text in self._cut(parts):
            ids += self._encode(text)
        ids_of_author: list[int] = []
        for part in parts:
            if not part.is_plain:
                ids_of_author += self._encode(part.text)
        if self._find_special(ids) != self._find_special(ids_of_author):
            text = "".join(part.text for part in parts)
            expected = "values that the tokenizer takes for plain text"
            got = f"{brief(text)}, in which it finds a special token"
            raise InputError(f"tok.text({template!r})", expected, got)
        return ids

    def _encode(self, text: str) -> list[int]:
        if len(text) > MAX_CACHED_TEXT:
            return self._encode_uncached(text)
        return self._encode_cached(text)

    def _encode_uncached(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _cut(self, parts: Sequence[_Part]) -> list[str]:
        """Cut a filled template inside each special token that has a part in a value.

        A tokenizer finds a special token in one text only.
        """
        text = ""
        value_spans: list[tuple[int, int]] = []
        for part in parts:
            if part.is_plain:
                value_spans.append((len(text), len(text) + len(part.text)))
            text += part.text
        cuts = {0, len(text)}
        for match in self._special_pattern.finditer(text):
            start, stop = match.span(1)
            for value_start, value_stop in value_spans:
                if start < value_stop and value_start < stop:
                    # inside both the token and the value, or at the value's start
                    cuts.add(max(start + 1, value_start))
        return [text[start:stop] for start, stop in pairwise(sorted(cuts))]

    def _find_special(self, ids: Sequence[int]) -> list[int]:
        """Find the special tokens among ids.

        The unknown token is left out: it stands for other texts, too.
        """
        special = self.special_texts.values()
        return [token for token in ids if token in special and token != self.unknown_id]

    @cached_property
    def special_texts(self) -> dict[str, int]:
        """The special tokens by their texts.

        These are what the tokenizer marks as special, and added tokens of the form that no ordinary
        text has. Added words are ordinary.
        """
        marked = set(getattr(self.tokenizer, "all_special_ids", ()))
        for token, added in getattr(self.tokenizer, "added_tokens_decoder", {}).items():
            if getattr(added, "special", False):
                marked.add(token)
        texts = {text: token for text, token in self._ids.items() if token in marked}
        for text, token in self._added_ids.items():
            if token in marked or _RESERVED.fullmatch(text):
                texts[text] = token
        return texts

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """The pattern of the longest special token at every position of a text.

        The lookahead lets the next match begin inside this one.
        """
        texts = [text for text in self.special_texts if text]
        texts.sort(key=len, reverse=True)
        # nothing matches the empty class
        alternatives = "|".join([re.escape(text) for text in texts]) or r"[^\s\S]"
        return re.compile(f"(?=({alternatives}))")

    def learn(self, texts: Sequence[str]) -> None:
        """Encode several texts in one call of a tokenizer that takes them, for `text`."""
        if texts and callable(self.tokenizer):
            ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            self._learned_ids.update(zip(texts, ids, strict=True))

    # -- decoding ----------------------------------------------------------------------------------

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def split_into_pieces(self, ids: Sequence[int]) -> list[tuple[str, int]]:
        """Split the text of ids into pieces, each with the number of its ids.

        A piece is one id, or those that make one character together.
        """
        pieces: list[tuple[str, int]] = []
        character: list[int] = []  # ids of a part of a character
        for token in ids:
            text = self._decode_id(token)
            if _UNDECODED not in text:
                if character:
                    pieces.append((self._decode_inside(character), len(character)))
                    character = []
                pieces.append((text, 1))
                continue
            character.append(token)
            text = self._decode_inside(character)
            if len(character) == MAX_CHARACTER_IDS or self._is_whole(character, text):
                pieces.append((text, len(character)))
                character = []
        if character:
            pieces.append((self._decode_inside(character), len(character)))
        return pieces

    def _is_whole(self, ids: list[int], text: str) -> bool:
        """Return whether ids are all ids of a text.

        The character that stands for what cannot be decoded may be in the text itself.
        """
        return _UNDECODED not in text or self._encode_inside(text) == ids

    def decode_simple(self, ids: Sequence[int]) -> str | None:
        """Return the text of ids that are a text each.

        Return None where some make a character together.
        """
        for token in set(ids).difference(self._texts):
            self._decode_id(token)
        text = "".join([self._texts[token] for token in ids])
        if _UNDECODED in text:
            return None
        return text

    def decode_target(self, target: Sequence[int]) -> str:
        """Return the text of a target.

        The space that the tokenizer writes before every text is left out.
        """
        text = "".join([piece for piece, _ in self.split_into_pieces(target)])
        if self._begins_with_space:
            return text.removeprefix(" ")
        return text

    def encode_inside(self, text: str) -> list[int] | None:
        """Return the ids of a text inside another one, where no tokenizer writes a space before it.

        Returns:
            None where the beginning of the text merges with whatever stands before it, and for a
            text that was not decoded as a whole.
        """
        if _UNDECODED in text:
            return None
        return self._encode_inside(text)

    def _encode_inside(self, text: str) -> list[int] | None:
        # behind one of these texts, unless it merges with all of them
        for before in ("\n", "a", "."):
            lead = self.tokenizer.encode(before, add_special_tokens=False)
            ids: list[int] = self.tokenizer.encode(before + text, add_special_tokens=False)
            if ids[: len(lead)] == lead:
                return ids[len(lead) :]
        return None

    @cached_property
    def _begins_with_space(self) -> bool:
        """Whether the tokenizer writes a space before every text, as Llama 2's does."""
        return self.text("a") != self.encode_inside("a")

    def _decode_id(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode_inside([token])
        return self._texts[token]

    def _decode_inside(self, ids: list[int]) -> str:
        """Return the text of ids inside a text.

        At the beginning of one, tokenizers remove a space.
        """
        lead = self.text("a")
        try:
            before = self.decode(lead)
            text = self.decode(lead + ids)
            if text.startswith(before):
                return text.removeprefix(before)
            return self.decode(ids)
        except Exception:
            # what it cannot decode is part of no target; the request needs the other ids
            logger.warning("the tokenizer cannot decode the ids %s", ids, exc_info=True)
            return ""


# -- templates -------------------------------------------------------------------------------------


def fill_template(text: str, *values: Any) -> str:
    """Return a text, or a template with its values in it."""
    if not values:
        return text
    return text.format(*values)


class _Part(NamedTuple):
    """A part of a filled template, and whether it is encoded as plain text."""

    text: str
    is_plain: bool


def is_text_of_caller(value: Any) -> bool:
    """Return whether a value of a template may be a caller's text, which is encoded as plain text.

    A number is none: it spells what the template around it was written for, as in ``<|image_{}|>``.
    """
    return isinstance(value, str) and not isinstance(value, AuthorText)


def _split_template(template: str, values: Sequence[Any]) -> list[_Part]:
    """Split a filled template into parts of the author and parts that are encoded as plain text.

    Neighbours of one kind are one part.
    """
    formatter = Formatter()
    position = 0  # of the next field without a name
    parts: list[_Part] = []
    for literal, name, spec, conversion in formatter.parse(template):
        _append_part(parts, literal, False)
        if name is None:
            continue
        if not name or name[0] in ".[":
            name = f"{position}{name}"
            position += 1
        value, _ = formatter.get_field(name, values, {})
        spec = spec or ""
        if "{" in spec:
            expected = "a template without a field inside a format specification"
            remedy = "Write the width as a number."
            raise SpecError(f"tok.text({template!r})", expected, repr(spec), remedy)
        text = formatter.format_field(formatter.convert_field(value, conversion), spec)
        _append_part(parts, text, is_text_of_caller(value))
    return parts


def _append_part(parts: list[_Part], text: str, is_plain: bool) -> None:
    """Append a part of a template, or lengthen the last one if it is of the same kind."""
    if parts and parts[-1].is_plain == is_plain:
        text = parts.pop().text + text
    parts.append(_Part(text, is_plain))


# -- configs and ids -------------------------------------------------------------------------------


def read_text_config(config: Any, *names: str) -> list[Any]:
    """Read attributes of the language model's part of a Hugging Face config, each or None."""
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if isinstance(config, Mapping):
        return [config.get(name) for name in names]
    return [getattr(config, name, None) for name in names]


def read_vocab_size(config: Any, default: int | None = None) -> int:
    """Read the number of ids of the language model from a Hugging Face config.

    Args:
        config: the config.
        default: the size where the config has none.

    Raises:
        SpecError: the config does not state it, and there is no default.
    """
    (size,) = read_text_config(config, "vocab_size")
    if size is None:
        size = default
    if not isinstance(size, int):
        raise SpecError("config", "a vocab_size in the language model's part", repr(size))
    if size > sys.maxunicode:
        # prompts are searched as texts of one character per id, of which one stands for items
        raise SpecError("config", f"a vocab_size of at most {sys.maxunicode}", str(size))
    return size


def list_end_ids(config: Any, vocabulary: Vocabulary | None) -> set[int]:
    """Return the ids with which an answer ends, as config and tokenizer state them."""
    (end,) = read_text_config(config, "eos_token_id")
    ends = list(end) if isinstance(end, (list, tuple)) else [end]
    if vocabulary is not None:
        ends.append(getattr(vocabulary.tokenizer, "eos_token_id", None))
    return {token for token in ends if token is not None}


def describe_id(token: Any) -> str:
    """Describe what stands in place of a token id, for messages."""
    if type(token) is int:
        return str(token)
    return f"{type(token).__name__} {token!r}"


def check_spec_ids(ids: Sequence[int], size: int, where: str) -> None:
    """Refuse ids of a spec outside a vocabulary of this size.

    Raises:
        SpecError: names the largest.
    """
    if not ids or max(ids) < size:
        return
    remedy = "Use a reserved id inside the vocabulary: vLLM refuses prompts with other ids."
    raise SpecError(where, f"token ids below the vocabulary size {size}", str(max(ids)), remedy)


# -- messages --------------------------------------------------------------------------------------

MAX_IDS_SHOWN = 8
"""The most ids that a message shows in full."""


def describe_ids(ids: Sequence[int], tok: Vocabulary | None = None) -> str:
    """Return ids for a message, as their text where there is a vocabulary that has one for them."""
    ids = list(ids)
    if len(ids) > 1 and len(set(ids)) == 1:
        return f"{describe_ids(ids[:1], tok)} * {len(ids)}"
    is_short = len(ids) <= MAX_IDS_SHOWN
    first_ids = ids if is_short else ids[:4]
    text = ""
    if tok is not None:
        text = tok.decode_target(first_ids).strip(" ")
    has_text = bool(text.strip())
    if is_short:
        return repr(text) if has_text else str(ids)
    if has_text:
        return f"{text!r}... of {len(ids)} tokens"
    numbers = ", ".join([str(token) for token in first_ids])
    return f"[{numbers}, ... {len(ids)} ids]"
