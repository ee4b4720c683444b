"""Do the tests notice a change of the pure core? Mutation testing with the operators of cosmic-ray.

    python -m tools.mutants --sample 400 --seed 16 --store out/mutants.json

A place is a position of the source where an operator of cosmic-ray applies, but for those that no
test can notice: annotations, what only a type checker reads, `strict=` of `zip`, `slots=`.
The seed draws the places, and one mutant for each. First the tests run once, to see which of them
pass through which line. Then every mutant has a process of its own, a fork of one that has imported
what takes long: there the module is imported with the change, and the tests of its line run, the
shortest first, until one fails: the mutant is killed. Files are not written, so that a program that
a test starts does not have the mutant.
"""

import ast
import difflib
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from itertools import accumulate
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Any

import typer
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from coverage import Coverage, CoverageData
from tqdm import tqdm

from tools.shared import ROOT

MODULES = """\
language/expr language/layout language/field language/modality language/spec
language/items/base language/items/tensor language/items/media
plan/parsing plan/processing plan/layouts plan/modality plan/placement plan/merging
plan/text_targets plan/plan"""
OURS = ("mmkit", "tests", "examples", "tools", "__main__", "__mp_main__")
"""What no process of a mutant has imported before."""

PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
EQUIVALENT = ("Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")
"""Of None, booleans, small integers and classes, which is what is compared here, these say the
same."""

UNNOTICED = ("strict=True", "slots=True")
"""Arguments of `zip` and `dataclass`: one asserts what holds already, the other saves memory."""

BUDGET = 30
"""Seconds for the tests of one mutant, as measured while their lines were recorded."""

WAITS = 600
"""Seconds after which a mutant's tests wait for something that does not come."""

Position = tuple[int, int]
Seconds = dict[str, float]
"""What each test takes, by its name without parameters."""


@dataclass(frozen=True)
class Mutant:
    """One change: the `occurrence`-th place of a module where an operator applies."""

    module: str
    position: Position
    operator: str
    occurrence: int

    def source(self) -> str:
        """The module with the change. Operators with arguments are not used."""
        operator = plugins.get_operator(self.operator)()
        changed = mutate_code((ROOT / self.module).read_text(), operator, self.occurrence)
        assert changed is not None, self
        return changed

    def difference(self) -> str:
        """The changed lines."""
        before = (ROOT / self.module).read_text().splitlines()
        lines = list(difflib.unified_diff(before, self.source().splitlines(), lineterm="", n=0))
        return "\n".join(lines[3:])


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: `killed`, `timeout`, or `survived`."""

    mutant: Mutant
    end: str
    difference: str
    seconds: float


# -- mutants ---------------------------------------------------------------------------------------


def mutants_of(module: str) -> Iterator[Mutant]:
    """All mutants of a module, but for those that no test can notice."""
    source = (ROOT / module).read_text()
    unnoticed = unnoticed_spans(source)
    nodes = list(ast_nodes(get_ast(source)))
    for name in sorted(plugins.operator_names()):
        kind = plugins.get_operator(name)
        if kind.arguments() or name.endswith(EQUIVALENT):
            continue
        positions = (at for node in nodes for at in kind().mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if not any(first <= start < last for first, last in unnoticed):
                yield Mutant(module, start, name, occurrence)


def unnoticed_spans(source: str) -> list[tuple[Position, Position]]:
    """Where annotations and type aliases stand, bodies of `if TYPE_CHECKING`, and `UNNOTICED`."""
    parts: list[Any] = []
    for node in ast.walk(ast.parse(source)):
        parts += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.dump(node.annotation):
            parts.append(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            parts += node.body
        if isinstance(node, ast.keyword) and ast.unparse(node) in UNNOTICED:
            parts.append(node)
    return [
        ((it.lineno, it.col_offset), (it.end_lineno or 0, it.end_col_offset or 0))
        for it in parts
        if isinstance(it, ast.AST)
    ]


def sample(modules: list[str], size: int, seed: int) -> list[Mutant]:
    """`size` mutants, each at another place; all places where there are fewer."""
    places: dict[tuple[str, Position], list[Mutant]] = defaultdict(list)
    for module in modules:
        for mutant in mutants_of(module):
            places[module, mutant.position].append(mutant)
    draw = random.Random(seed)
    chosen = draw.sample(sorted(places), min(size, len(places)))
    return [draw.choice(places[place]) for place in chosen]


# -- the tests of a line ---------------------------------------------------------------------------


def cover(folder: str, tests: list[str], paths: list[str]) -> None:
    """In a process of its own: each test is a context. Tells its seconds, and all imports."""
    import pytest

    sys.dont_write_bytecode = False  # else each process rewrites the assertions of all tests
    seconds: Seconds = defaultdict(float)

    class Contexts:
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_setup(self, item: pytest.Item) -> None:
            coverage.switch_context(without_parameters(item.nodeid))

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            seconds[without_parameters(report.nodeid)] += report.duration

    coverage = Coverage(data_file=f"{folder}/lines", include=paths)
    coverage.start()
    status = pytest.main([*PYTEST, *tests], plugins=[Contexts()])
    coverage.stop()
    coverage.save()
    # their names are one argument of a command, and must not be too long
    short = [name for name in sys.modules if name.count(".") < 2]
    modules = [name for name in short if name.partition(".")[0] not in OURS]
    Path(folder, "told").write_text(json.dumps([seconds, modules]))
    os._exit(int(status))


def without_parameters(name: str) -> str:
    return name.partition("[")[0]


def tests_of(mutant: Mutant, lines: CoverageData, seconds: Seconds) -> Seconds:
    """The shortest of the tests that pass through its statement, as many as `BUDGET` allows.

    Of what runs at import, also that of a test, the tests of its module.
    """
    by_line = lines.contexts_by_lineno(str(ROOT / mutant.module))
    through = {each for line in statement_around(mutant) for each in by_line.get(line, ())}
    if not through or "" in through:
        through = {each for of in by_line.values() for each in of}
    chosen = sorted(through - {""}, key=seconds.__getitem__)
    total = accumulate(seconds[name] for name in chosen)
    return {name: seconds[name] for name, sum_ in zip(chosen, total, strict=True) if sum_ < BUDGET}


def statement_around(mutant: Mutant) -> range:
    """The lines of the innermost statement with a mutant, of one with a body those before it."""
    line, found = mutant.position[0], []
    for node in ast.walk(ast.parse((ROOT / mutant.module).read_text())):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            body = getattr(node, "body", None)
            first = getattr(node, "lineno", None) or node.pattern.lineno
            found.append(range(first, body[0].lineno if body else node.end_lineno + 1))
    around = [lines for lines in found if line in lines]
    return min(around, key=len, default=range(line, line + 1))


# -- running ---------------------------------------------------------------------------------------


def run(mutant: Mutant, source: str, seconds: Seconds) -> None:
    """In a process of its own: the exit status is that of pytest."""
    import pytest

    sys.dont_write_bytecode = False  # else each process rewrites the assertions of all tests

    class Changed(SourceFileLoader):
        def get_code(self, fullname: str) -> Any:
            return compile(source, self.path, "exec")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any, target: Any = None) -> Any:
            if name == mutant.module.removesuffix(".py").replace("/", "."):
                return spec_from_file_location(name, file, loader=Changed(name, file))
            return None

    class Shortest:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            names = {item: without_parameters(item.nodeid) for item in items}
            own = [item for item in items if names[item] in seconds]
            items[:] = sorted(own, key=lambda item: seconds[names[item]])

    file = str(ROOT / mutant.module)
    sys.meta_path.insert(0, Finder())
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    # of processors, not of a clock: the machine may be busy
    limit = 15 + int(sum(seconds.values()))
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    files = sorted({name.partition("::")[0] for name in seconds})
    os._exit(int(pytest.main([*PYTEST, *files], plugins=[Shortest()])))


def judge(mutant: Mutant, lines: CoverageData, seconds: Seconds) -> Outcome:
    """Run the tests of a mutant."""
    start = time.perf_counter()
    end, difference = "survived", mutant.difference()
    if own := tests_of(mutant, lines, seconds):
        process = process_of("forkserver", run, mutant, mutant.source(), own)
        process.join(WAITS)
        if process.is_alive():
            process.kill()
            end = "timeout"
        elif process.exitcode:
            end = "timeout" if process.exitcode < 0 else "killed"
    return Outcome(mutant, end, difference, time.perf_counter() - start)


def process_of(start: str, target: Any, *args: Any) -> Any:
    process: Any = multiprocessing.get_context(start).Process(target=target, args=args)
    process.start()
    return process


def main(
    size: Annotated[int, typer.Option("--sample", help="how many mutants")] = 400,
    seed: Annotated[int, typer.Option(help="which of them")] = 16,
    jobs: Annotated[int, typer.Option(help="how many at once")] = 1,
    modules: Annotated[str, typer.Option(help="of mmkit")] = MODULES,
    tests: Annotated[str, typer.Option(help="arguments of pytest")] = "tests/unit",
    store: Annotated[Path | None, typer.Option(help="a JSON file for the outcomes")] = None,
    again: Annotated[Path | None, typer.Option(help="only what survived in this file")] = None,
) -> None:
    """Print the share of mutants that the tests kill, by module, and the survivors."""
    # failing examples are not made smaller
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    os.chdir(ROOT)
    paths = [f"mmkit/{name}.py" for name in modules.split()]
    chosen = survivors(again) if again else sample(paths, size, seed)
    with tempfile.TemporaryDirectory() as folder, ThreadPool(jobs) as pool:
        print("running the tests once", flush=True)
        first = process_of("spawn", cover, folder, tests.split(), paths)
        first.join()
        if first.exitcode:
            sys.exit("The tests fail without any mutant.")
        lines = CoverageData(f"{folder}/lines")
        lines.read()
        seconds, imported = json.loads(Path(folder, "told").read_text())
        multiprocessing.get_context("forkserver").set_forkserver_preload(imported)
        judged = pool.imap(partial(judge, lines=lines, seconds=seconds), chosen)
        outcomes = []
        for outcome in tqdm(judged, total=len(chosen), unit="mutant"):
            outcomes.append(outcome)
            if store:  # as it goes: all take half an hour
                store.parent.mkdir(parents=True, exist_ok=True)
                store.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    report(outcomes)


def survivors(stored: Path) -> list[Mutant]:
    """Those of another run, for other tests."""
    outcomes = json.loads(stored.read_text())
    return [Mutant(**one["mutant"]) for one in outcomes if one["end"] == "survived"]


def report(outcomes: list[Outcome]) -> None:
    """The survivors, and a table."""
    for one in outcomes:
        if one.end != "killed":
            where = f"{one.mutant.module}:{one.mutant.position[0]}"
            print(f"\n{one.end}: {where} {one.mutant.operator}\n{one.difference}")
    print()
    for module in sorted({one.mutant.module for one in outcomes}):
        print(share(module, [one for one in outcomes if one.mutant.module == module]))
    print(share("all", outcomes))


def share(name: str, outcomes: list[Outcome]) -> str:
    """A mutant whose tests take too long is killed: it loops."""
    killed = sum(one.end != "survived" for one in outcomes)
    return f"{name:20} {killed:4} of {len(outcomes):4} killed, {killed / len(outcomes):.1%}"


if __name__ == "__main__":
    typer.run(main)
