"""The values of the roots, in which an expression is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from .node import Node


@dataclass(frozen=True, slots=True)
class Scope:
    """The values of the roots: the argument of a plain function in place of an expression.

    Attributes:
        cfg: Hugging Face config, or None before binding.
        proc: Hugging Face processor, or None where the model has none.
        tok: `mmkit.language.vocabulary.Vocabulary`: ``tok[token]`` is an id, ``tok.text(text)``
            a list of ids; None without a tokenizer.
        item: facts of the current item.
        fields: processed fields of the current item.
        prompt: the caller's token ids.
        counts: number of items of the request by modality, for functions that rewrite prompts.
        kwargs: the request's `mm_processor_kwargs`, merged with those of the engine.
        loop: values of the loop variables of enclosing `each` layouts, outermost first.
        folded: expressions that were folded in this scope, with their results, by the identity of
            the expression: the parts of a spec share expressions.
    """

    cfg: Any = None
    proc: Any = None
    tok: Any = None
    item: Any = None
    fields: Any = None
    prompt: Any = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loop: tuple[Any, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    folded: dict[int, tuple[Node, Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def for_item(self, item: Any, fields: Mapping[str, Any] | None) -> Scope:
        """Return this scope for one item."""
        # faster than dataclasses.replace, once per item
        return Scope(
            self.cfg,
            self.proc,
            self.tok,
            item,
            fields,
            self.prompt,
            self.kwargs,
            self.loop,
            self.counts,
        )

    def for_prompt(self, prompt: list[int], counts: Mapping[str, int]) -> Scope:
        """Return this scope for a function that rewrites a prompt."""
        # faster than dataclasses.replace, once per request
        return Scope(
            self.cfg,
            self.proc,
            self.tok,
            self.item,
            self.fields,
            prompt,
            self.kwargs,
            self.loop,
            counts,
        )

    def in_loop(self, depth: int, value: Any) -> Scope:
        """Return this scope inside an `each` at that depth, whose current element is `value`."""
        outer = self.loop[:depth]
        # an `each` that was bound without the outer ones sees none of their elements
        missing = (None,) * (depth - len(outer))
        return replace(self, loop=(*outer, *missing, value))


class Fields(dict[str, Any]):
    """The processed fields of one item: ``fields.grid`` is ``fields["grid"]``."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the processed fields lack {name!r}; they have {sorted(self)}")


class Absent(SimpleNamespace):
    """The facts of an optional part that an item leaves out: false, and without attributes."""

    def __bool__(self) -> bool:
        return False


def to_python(value: Any) -> Any:
    """Return a Python number or tuple for a tensor or array, and any other value as it is."""
    if hasattr(type(value), "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple([to_python(element) for element in value])
    return value
