"""``mmkit check``: every reason why a spec cannot be bound to a checkpoint, then the laws that need
no engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from ..process import HF
from ..spec import Modality
from ..updates import already_expanded
from .common import UsageError, open_checkpoint, plural

if TYPE_CHECKING:
    from ..testing import Result


@dataclass(frozen=True)
class Checked:
    """What came of a check.

    Attributes:
        spec: name of the spec.
        errors: why it cannot be bound; empty if it can.
        results: what came of the laws, which are not checked if there are errors.
        remedy: what may help against the errors.
    """

    spec: str
    errors: list[str]
    results: list[Result] = field(default_factory=list)
    remedy: str = ""

    def __bool__(self) -> bool:
        return not self.errors and all(result.status != "violated" for result in self.results)


def check(
    spec: ModelSpec,
    folder: str | Path,
    *,
    laws: Iterable[str] | None = None,
    examples: int | None = None,
    progress: Callable[[Result], None] | None = None,
    trust_remote_code: bool = False,
) -> Checked:
    """Bind a spec to a checkpoint and check its laws, without an engine and without weights.

    Args:
        spec: the declaration.
        folder: of the checkpoint.
        laws: their numbers; None for all that need no model.
        examples: Hypothesis examples per law.
        progress: called with each result as it comes.
        trust_remote_code: run code that the checkpoint brings.

    Raises:
        UsageError: an unknown law, or a folder that cannot be read.
    """
    opened = open_checkpoint(spec, folder, trust_remote_code=trust_remote_code)
    numbers = chosen(laws)
    if errors := binding_errors(spec, opened.scope):
        return Checked(spec.name, errors, remedy=opened.remedy)
    import mmkit.testing

    options: dict[str, Any] = {"examples": examples, "trust_remote_code": trust_remote_code}
    report = mmkit.testing.check(spec, folder, laws=numbers, progress=progress, **options)
    return Checked(spec.name, [], report.results)


def chosen(laws: Iterable[str] | None) -> list[str]:
    """The numbers of the laws to check: those asked for, or all that need no model.

    Raises:
        UsageError: a law that there is not, or that needs the model.
    """
    from ..testing import LAWS

    free = [number for number, law in LAWS.items() if not law.needs_model]
    expected = f"laws among {', '.join(free)}"
    numbers = free if laws is None else [law.strip().upper() for law in laws]
    for number in numbers:
        if number not in LAWS:
            raise UsageError("--laws", expected, repr(number))
        if number not in free:
            remedy = f'mmkit.testing.check(SPEC, folder, laws=["{number}"], model=True) loads it.'
            raise UsageError("--laws", expected, f"{number}, which needs the model", remedy)
    if not numbers:
        raise UsageError("--laws", expected, "none")
    return numbers


# -- binding ---------------------------------------------------------------------------------------


def binding_errors(spec: ModelSpec, scope: Scope) -> list[str]:
    """Why a spec cannot be bound: one sentence for each part of each modality that cannot, in the
    order of the declaration.

    A modality whose parts all bind is then taken to its layouts, which tells the rest: ids outside
    the vocabulary, an item without placeholders.
    """
    errors: list[str] = []
    for modality in spec.modalities:
        errors += _of_modality(spec, modality, scope)
    for name in ("prompt", "decoder_prompt"):
        errors += _refusals(partial(_bound, getattr(spec, name), scope), f"{spec.name}.{name}")
    # what only the whole shows
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
    """What binds by itself: its name, as errors of a plan have it, and how."""
    parts = [("item", modality.item), ("layout", modality.layout)]
    parts += [("update", update) for update in modality.update]
    parts += [("fields", field) for field in modality.fields.values()]
    parts += [("process", modality.process)] if isinstance(modality.process, HF) else []
    parts += [("embeds", modality.embeds)] if isinstance(modality.embeds, Layout) else []
    yield from ((name, partial(_bound, part, scope)) for name, part in parts)


def _limited(modality: Modality) -> Modality:
    """A modality of which nothing but the limit can fail to bind."""
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


# -- output ----------------------------------------------------------------------------------------

_STYLE = {"holds": ("✓", "green"), "violated": ("✗", "bold red"), "skipped": ("–", "dim")}


def run(
    spec: ModelSpec,
    folder: str | Path,
    *,
    laws: Iterable[str] | None = None,
    examples: int | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Check a spec and print what came of it: each verdict as it comes, then each violation in
    full.

    Returns:
        The exit status: 1 if the spec cannot be bound or violates a law.
    """
    console = Console(highlight=False)

    def verdict(result: Result) -> None:
        mark, style = _STYLE[result.status]
        detail = f"  {result.detail}" if result.status == "skipped" else ""
        name = f"{result.law:16}  "
        line = (f"{mark}  ", style), (name, "bold"), (result.status, style), (detail, "dim")
        console.print(Text.assemble(*line))

    options: dict[str, Any] = {"examples": examples, "trust_remote_code": trust_remote_code}
    checked = check(spec, folder, laws=laws, progress=verdict, **options)
    for error in checked.errors:
        console.print(Text.assemble(("✗ ", "bold red"), error))
    for result in checked.results:
        if result.status == "violated":
            console.print(Text.assemble((f"\n{result.law}", "bold"), f": {result.detail}"))
    counts: Counter[str] = Counter(result.status for result in checked.results)
    summary = ", ".join(f"{counts[status]} {status}" for status in _STYLE if counts[status])
    if checked.errors:
        summary = f"{plural(len(checked.errors), 'error')}, it cannot be bound"
    console.print(Text(f"\n{spec.name}: {summary}. {checked.remedy}".rstrip()))
    return int(not checked)
