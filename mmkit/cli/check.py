"""``mmkit check``: every reason why a spec cannot be bound to a checkpoint, then the laws that need
no engine, as tests of pytest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..bound.modality import BoundModality
from ..errors import SpecError
from ..expr import Scope, truth
from ..field import batched
from ..items.tensor import Tensor
from ..layout import Layout, embed
from ..model_spec import ModelSpec
from ..plan import Plan
from ..plugin import named
from ..process import HF
from ..spec import Modality
from ..updates import already_expanded
from .common import checkpoint, needs_vllm, open_checkpoint, plural


def run(
    target: str,
    folder: str | Path,
    arguments: Sequence[str] = (),
    *,
    samples: str | None = None,
    expected: Path | None = None,
    examples: int | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Bind a spec to a checkpoint, then check its laws, without an engine and without weights.

    Args:
        target: the name of a spec; `registered` for the processor that vLLM, or a plugin, has for
            the checkpoint.
        folder: folder of the checkpoint.
        arguments: further ones for pytest, which neither reads settings of this directory nor its
            `conftest.py`.
        samples: ``package.module:function``, which returns strategies for items, by modality.
        expected: a file of known violations; see `mmkit.testing.plugin.expectations`.
        examples: Hypothesis examples per law.
        trust_remote_code: run code that the checkpoint brings.

    Returns:
        The exit status: 1 if the spec cannot be bound or a law failed.

    Raises:
        MmkitError: a folder, a file or a function that cannot be read, or pytest is missing.
    """
    path = checkpoint(folder)
    if target != "registered":
        spec: ModelSpec = named(target, ModelSpec)
        opened = open_checkpoint(spec, path, trust_remote_code=trust_remote_code)
        if errors := binding_errors(spec, opened.scope):
            console = Console(highlight=False)
            for error in errors:
                console.print(Text.assemble(("✗ ", "bold red"), error))
            count = plural(len(errors), "error")
            summary = f"\n{spec.name}: {count}, it cannot be bound. {opened.remedy}"
            console.print(Text(summary.rstrip()))
            return 1
    with needs_vllm():
        import pytest

        from ..testing.plugin import expectations
    expectations(expected)
    if samples is not None:
        named(samples)
    given = {"examples": examples, "samples": samples, "expected": expected}
    options = [f"--mmkit-{name}={value}" for name, value in given.items() if value is not None]
    options += ["--mmkit-trust-remote-code"] * trust_remote_code
    alone = ("-c", os.devnull, "--rootdir", os.getcwd(), "--noconftest")
    told = ("-v", "-rs", "--no-header", "--disable-warnings")
    asked = ("--mmkit", target, "--mmkit-model", str(path), *options)
    return int(pytest.main([*asked, *alone, *told, *arguments]))


def binding_errors(spec: ModelSpec, scope: Scope) -> list[str]:
    """The reasons why a spec cannot be bound: one sentence for each part of each modality that
    cannot, in the order of the declaration.

    A modality whose parts all bind is then bound as a whole, which finds the rest: ids outside the
    vocabulary, an item without placeholders.
    """
    errors: list[str] = []
    for modality in spec.modalities:
        errors += _of_modality(spec, modality, scope)
    for name in ("prompt", "decoder_prompt"):
        errors += _refusals(partial(_bound, getattr(spec, name), scope), f"{spec.name}.{name}")
    # reasons that only the whole spec shows
    return [*dict.fromkeys(errors)] or _refusals(lambda: _bind(spec, scope))


def _of_modality(spec: ModelSpec, modality: Modality, scope: Scope) -> list[str]:
    where = f"{spec.name}.{modality.name}"
    if errors := _refusals(lambda: truth(modality.when, scope), f"{where}, when"):
        return errors
    if not truth(modality.when, scope):
        return []
    for part, bind in _parts(modality, scope):
        errors += _refusals(bind, f"{where}, {part}")
    errors += _refusals(lambda: BoundModality(_limited(modality), where, scope))
    return errors or _refusals(lambda: _bind(ModelSpec(spec.name, modality), scope))


def _parts(modality: Modality, scope: Scope) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The parts that bind alone: the name in a plan's errors, and a function that binds."""
    parts = [("item", modality.item), ("layout", modality.layout)]
    parts += [("update", update) for update in modality.update]
    parts += [("fields", field) for field in modality.fields.values()]
    parts += [("process", modality.process)] if isinstance(modality.process, HF) else []
    parts += [("embeds", modality.embeds)] if isinstance(modality.embeds, Layout) else []
    yield from ((name, partial(_bound, part, scope)) for name, part in parts)


def _limited(modality: Modality) -> Modality:
    """A modality of which only the limit can fail to bind."""
    name, limit = modality.name, modality.limit
    return Modality(
        name,
        item=Tensor(shape=()),
        layout=embed(0),
        update=already_expanded(),
        fields={name: batched()},
        limit=limit,
    )


def _bound(declared: Any, scope: Scope) -> Any:
    return None if declared is None else declared.bind(scope)


def _bind(spec: ModelSpec, scope: Scope) -> Plan:
    return spec.bind(scope.cfg, scope.tok, processor=scope.proc, kwargs=scope.kwargs)


def _refusals(bind: Callable[[], Any], where: str = "") -> list[str]:
    try:
        bind()
    except SpecError as error:
        sentence = str(error)
    except Exception as error:  # of a function of the spec, or of the Hugging Face processor
        sentence = f"{type(error).__name__}: {error}"
    else:
        return []
    return [f"{where}: {sentence}" if where else sentence]
