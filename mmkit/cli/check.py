"""``mmkit check``: every reason why a spec cannot be bound to a checkpoint, then the laws that need
no engine."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from .common import (
    REGISTERED,
    UsageError,
    checkpoint,
    needs_vllm,
    open_checkpoint,
    plural,
    reason,
    write,
)

if TYPE_CHECKING:
    from ..testing import Report, Result, Subject


@dataclass(frozen=True)
class Checked:
    """The result of a check; true if nothing failed.

    Attributes:
        spec: name of the spec.
        errors: reasons why the spec cannot be bound; empty if it can.
        results: the results of the laws, which are not checked if there are errors.
        remedy: a hint against the errors.
    """

    spec: str
    errors: list[str]
    results: list[Result] = field(default_factory=list)
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.exit_status == 0

    @property
    def report(self) -> Report:
        """The results, for other programs; each reason why the spec cannot be bound is a result."""
        from ..testing import Report, Result

        unbound = [Result("binding", "violated", error) for error in self.errors]
        return Report(self.spec, unbound or self.results)

    @property
    def exit_status(self) -> int:
        """1 if the spec cannot be bound or a law failed, else 3 if mmkit's own code failed, else
        0."""
        return self.report.exit_status


def check(
    spec: ModelSpec | None,
    folder: str | Path,
    *,
    laws: Iterable[str] | None = None,
    examples: int | None = None,
    progress: Callable[[Result], None] | None = None,
    trust_remote_code: bool = False,
    expected: Mapping[str, str] | None = None,
    budget: float | None = None,
    jobs: int = 1,
    target: str = REGISTERED,
) -> Checked:
    """Bind a spec to a checkpoint and check its laws, without an engine and without weights.

    Args:
        spec: the declaration; None for the processor that vLLM, or a plugin, has for the
            checkpoint.
        folder: folder of the checkpoint.
        laws: numbers of laws; None for all that need no model.
        examples: Hypothesis examples per law.
        progress: called with each result as it comes.
        trust_remote_code: run code that the checkpoint brings.
        expected: laws that are known to be violated, with the reasons.
        budget: seconds for all laws together.
        jobs: number of processes that share the laws; each loads vLLM.
        target: the name by which several processes find the spec.

    Raises:
        UsageError: an unknown law, or a folder that cannot be read.
    """
    numbers = chosen(laws)
    options: dict[str, Any] = {"examples": examples, "progress": progress}
    options |= {"expected": expected or {}, "budget": budget}
    name = checkpoint(folder).name
    if spec is not None:
        name, opened = spec.name, open_checkpoint(spec, folder, trust_remote_code=trust_remote_code)
        if errors := binding_errors(spec, opened.scope):
            return Checked(name, errors, remedy=opened.remedy)
    if jobs > 1:
        from .jobs import shared

        opening = (target, checkpoint(folder), trust_remote_code)
        report = shared(opening, numbers, jobs, title=name, **options)
    else:
        import mmkit.testing

        subject = subject_of(spec, checkpoint(folder), trust_remote_code)
        report = mmkit.testing.check_subject(subject, laws=numbers, title=name, **options)
    return Checked(report.subject, [], report.results)


def subject_of(spec: ModelSpec | None, folder: Path, trust_remote_code: bool) -> Subject:
    """The subject of the laws.

    Args:
        spec: as for `check`.
        folder: as for `check`.
        trust_remote_code: as for `check`.

    Raises:
        UsageError: there is no processor for the checkpoint.
    """
    with needs_vllm():
        from ..testing import of_registered, of_spec

    if spec is not None:
        return of_spec(spec, folder, trust_remote_code=trust_remote_code)
    try:
        return of_registered(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        expected = "a checkpoint for which vLLM, or a plugin, has a multimodal processor"
        raise UsageError(f"--config {folder}", expected, reason(error)) from error


def expectations(file: Path) -> dict[str, str]:
    """The known violations of a TOML file, with a reason or a link for each: lines such as
    ``L5 = "pads to the batch"``.

    Raises:
        UsageError: the file cannot be read, or has other contents.
    """
    from ..testing import LAWS

    where, expected = f"--expected {file}", 'TOML lines as L5 = "a reason or a link"'
    try:
        known = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(where, expected, reason(error)) from error
    for number, why in known.items():
        if number not in LAWS:
            raise UsageError(where, f"laws among {', '.join(LAWS)}", repr(number))
        if not isinstance(why, str) or not why.strip():
            raise UsageError(where, expected, f"{number} = {why!r}")
    return known


def chosen(laws: Iterable[str] | None) -> list[str]:
    """The numbers of the laws to check: the given ones, or all that need no model.

    Raises:
        UsageError: an unknown law, or one that needs the model.
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


# -- output ----------------------------------------------------------------------------------------

_STYLE = {
    "holds": ("✓", "green"),
    "violated": ("✗", "bold red"),
    "not applicable": ("–", "dim"),
    "not drawn": ("?", "yellow"),
    "kit error": ("!", "bold magenta"),
}


def run(
    spec: ModelSpec | None,
    folder: str | Path,
    *,
    expected: Path | None = None,
    json: str | None = None,
    junit: str | None = None,
    **options: Any,
) -> int:
    """Check a spec and print the results: each verdict as it comes, then each violation in full,
    then the numbers of laws that hold, are violated, or neither.

    Args:
        spec: as for `check`.
        folder: as for `check`.
        expected: a file of known violations; see `expectations`.
        json: a file for the report as JSON; - for standard output, which then has nothing else.
        junit: a file for the report as JUnit's XML, likewise.
        options: options of `check`.

    Returns:
        The exit status: 1 if the spec cannot be bound or a law failed, 3 if only mmkit's own code
        failed.
    """
    console = Console(highlight=False, stderr="-" in (json, junit))
    known = expectations(expected) if expected is not None else {}
    checked = check(spec, folder, progress=partial(_line, console), expected=known, **options)
    for error in checked.errors:
        console.print(Text.assemble(("✗ ", "bold red"), error))
    for result in checked.results:
        if result.failed or result.status == "kit error":
            console.print(Text.assemble((f"\n{result.law}", "bold"), f": {_in_full(result)}"))
    report = checked.report
    for option, target, text in (("--json", json, report.json), ("--junit", junit, report.junit)):
        if target == "-":
            print(text(), end="")
        elif target is not None:
            write(target, text(), option)
    summary = report.summary
    if checked.errors:
        summary = f"{plural(len(checked.errors), 'error')}, it cannot be bound"
    console.print(Text(f"\n{checked.spec}: {summary}. {checked.remedy}".rstrip()))
    return checked.exit_status


def _line(console: Console, result: Result) -> None:
    mark, style = _STYLE[result.status]
    notes = [] if result.status in ("violated", "kit error") else [result.detail]
    if result.expected:
        mark, style = ("✗", "bold red") if result.failed else ("✓", "dim")
        notes.append(f"expected to be violated: {result.expected}")
    detail = "".join(f"  {note}" for note in notes if note)
    name = f"{result.law:16}  "
    line = (f"{mark}  ", style), (name, "bold"), (result.status, style), (detail, "dim")
    console.print(Text.assemble(*line))


def _in_full(result: Result) -> str:
    if result.status == "holds":
        return f"holds, and is expected to be violated: {result.expected}. Take it out of the file."
    if result.status == "kit error":
        blame = "An exception of mmkit's own code: please report it. The spec is not to blame."
        return f"{result.detail}\n{blame}\n{result.traceback}".rstrip()
    return result.detail
