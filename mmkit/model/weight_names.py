"""The names that a class of transformers reads from a checkpoint.

A checkpoint may have other names than the class: transformers renames published ones, and adds or
removes the prefix of the base model. vLLM's backend does so in another way than `from_pretrained`,
and before 0.18 not at all.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from ..errors import SpecError

EXPERTS = ".experts."
"""In the names of weights that transformers packs, and of which vLLM takes each alone."""


class WeightNames:
    """Renames the weights of a checkpoint as ``from_pretrained`` of a class does.

    An object can stand among the regular expressions of vLLM's `WeightsMapper`, of which that calls
    `search` and `sub`.

    Args:
        where: names the class in errors.
        model: a model of the class; its weights need no values.
    """

    def __init__(self, where: str, model: Any) -> None:
        self._where = where
        self._names = set(model.state_dict())
        self._prefix = f"{model.base_model_prefix}."
        self._renamings, self._converters = _find_conversions(model)

    def rename(self, name: str) -> str:
        """Return the name that a weight of a checkpoint has in the class."""
        name = self._rename_published(name)
        without_prefix = name.removeprefix(self._prefix)
        with_prefix = f"{self._prefix}{name}"
        if without_prefix != name and without_prefix in self._names:
            return without_prefix
        if with_prefix in self._names:
            return with_prefix
        return name

    def rename_all(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the weights of a checkpoint under the names of the class."""
        for name, tensor in weights:
            yield self.rename(name), tensor

    def search(self, name: str) -> bool:
        """Return whether a weight has another name in the class, as `re.Pattern.search` would."""
        return self.rename(name) != name

    def sub(self, _: str, name: str) -> str:
        """Return the name in the class, as `re.Pattern.sub` would."""
        return self.rename(name)

    def refuse_converted(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass on the weights of a checkpoint, as far as their values need no conversion.

        Raises:
            SpecError: transformers would split, join or turn a tensor, which vLLM does not.
        """
        for name, tensor in weights:
            if EXPERTS not in name and self._is_converted(name):
                remedy = (
                    "Load the checkpoint by from_pretrained of the class, and save it by "
                    "save_pretrained(folder, save_original_format=False)."
                )
                expected = "the values of a parameter of the class"
                got = "some that transformers splits, joins or turns"
                raise SpecError(f"{self._where}, weight {name}", expected, got, remedy)
            yield name, tensor

    def _rename_published(self, name: str) -> str:
        """Return a published name as transformers renames it; the prefix stays."""
        for rename in self._renamings:
            name = rename(name)
        return name

    def _is_converted(self, name: str) -> bool:
        name = self._rename_published(name)
        for converter in self._converters:
            _, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return True
        return False


def _find_conversions(model: Any) -> tuple[list[Callable[[str], str]], list[Any]]:
    """Return functions that rename a weight, in their order, and transformers' converters.

    Transformers 5 has a table for all models, and transformers 4 patterns in the class.
    """
    try:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
    except ModuleNotFoundError:
        patterns = getattr(model, "_checkpoint_conversion_mapping", {})
        return [partial(_replace_first, patterns)], []
    renamings: list[Callable[[str], str]] = []
    converters: list[Any] = []
    for transform in mapping.get_model_conversion_mapping(model):
        if isinstance(transform, mapping.WeightRenaming):
            renamings.append(partial(_rename, transform))
        else:
            converters.append(transform)
    return renamings, converters


def _rename(renaming: Any, name: str) -> str:
    renamed: str
    renamed, _ = renaming.rename_source_key(name)
    return renamed


def _replace_first(patterns: dict[str, str], name: str) -> str:
    """Replace what the first of the patterns matches."""
    for pattern, replacement in patterns.items():
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            return renamed
    return name
