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
import math
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
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
language/expr language/operations language/scope language/layout language/field
language/modality language/spec
language/items/base language/items/tensor language/items/media
plan/parsing plan/processing plan/layouts plan/modality plan/placement plan/placing
plan/placing_errors plan/merging plan/text_targets plan/plan"""
"""Files of mmkit, without their suffix."""

OURS = ("mmkit", "tests", "examples", "tools", "__main__", "__mp_main__")
"""What no process of a mutant has imported before."""

PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")

EQUIVALENT_OPERATORS = ("Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")
"""Of None, booleans, small integers and classes, which is what is compared here, these say the
same."""

EQUIVALENT_ARGUMENTS = ("strict=True", "slots=True")
"""Arguments of `zip` and `dataclass`: one asserts what holds already, the other saves memory."""

MAX_SECONDS = 30
"""Of processors, for the tests of one mutant, as measured while their lines were recorded."""

SECONDS_OF_WAITING = 600
"""After which a mutant's tests wait for something that does not come."""

Position = tuple[int, int]
"""A line, and a column."""

Seconds = dict[str, float]
"""What each test takes of processors, by its name without parameters."""


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
    mutants = read_survivors(again) if again else draw_mutants(paths, size, seed)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, ThreadPool(jobs) as pool:
        print("running the tests once", flush=True)
        coverage = measure_coverage(folder, tests.split(), paths)

        def judge(mutant: Mutant) -> Outcome:
            return judge_mutant(mutant, coverage)

        for outcome in tqdm(pool.imap(judge, mutants), total=len(mutants), unit="mutant"):
            outcomes.append(outcome)
            if store:  # as it goes: all take half an hour
                store.parent.mkdir(parents=True, exist_ok=True)
                store.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    print_report(outcomes)


@dataclass(frozen=True)
class Mutant:
    """One change: the `occurrence`-th place of a module where an operator applies."""

    module: str
    position: Position
    operator: str
    occurrence: int

    def source(self) -> str:
        """Return the module with the change. Operators with arguments are not used."""
        operator = plugins.get_operator(self.operator)()
        source = mutate_code((ROOT / self.module).read_text(), operator, self.occurrence)
        assert source is not None, self
        return source

    def difference(self) -> str:
        """Return the changed lines."""
        before = (ROOT / self.module).read_text().splitlines()
        lines = list(difflib.unified_diff(before, self.source().splitlines(), lineterm="", n=0))
        return "\n".join(lines[3:])


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        end: `killed`, `timeout`, or `survived`.
    """

    mutant: Mutant
    end: str
    difference: str
    seconds: float

    @property
    def survived(self) -> bool:
        """Whether the tests passed. A mutant whose tests take too long is killed: it loops."""
        return self.end == "survived"


# -- mutants ---------------------------------------------------------------------------------------


def draw_mutants(modules: list[str], size: int, seed: int) -> list[Mutant]:
    """Return `size` mutants, each at another place; all places where there are fewer."""
    mutants: dict[tuple[str, Position], list[Mutant]] = defaultdict(list)
    for module in modules:
        for mutant in list_mutants(module):
            mutants[module, mutant.position].append(mutant)
    draw = random.Random(seed)
    places = draw.sample(sorted(mutants), min(size, len(mutants)))
    return [draw.choice(mutants[place]) for place in places]


def list_mutants(module: str) -> Iterator[Mutant]:
    """Yield all mutants of a module, but for those that no test can notice."""
    source = (ROOT / module).read_text()
    excluded = find_unnoticeable_spans(source)
    nodes = list(ast_nodes(get_ast(source)))
    for name in sorted(plugins.operator_names()):
        operator = plugins.get_operator(name)
        if operator.arguments() or name.endswith(EQUIVALENT_OPERATORS):
            continue
        positions: list[Position] = []
        for node in nodes:
            for start, _ in operator().mutation_positions(node):
                positions.append(start)
        for occurrence, position in enumerate(positions):
            if not any(first <= position < last for first, last in excluded):
                yield Mutant(module, position, name, occurrence)


def find_unnoticeable_spans(source: str) -> list[tuple[Position, Position]]:
    """Return the spans of what no test can notice.

    These are annotations and type aliases, bodies of `if TYPE_CHECKING`, and
    `EQUIVALENT_ARGUMENTS`.
    """
    parts: list[Any] = []
    for node in ast.walk(ast.parse(source)):
        parts.append(getattr(node, "annotation", None))
        parts.append(getattr(node, "returns", None))
        if isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.dump(node.annotation):
            parts.append(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            parts.extend(node.body)
        if isinstance(node, ast.keyword) and ast.unparse(node) in EQUIVALENT_ARGUMENTS:
            parts.append(node)
    spans = []
    for part in parts:
        if isinstance(part, ast.AST):
            start = (part.lineno, part.col_offset)
            spans.append((start, (part.end_lineno or 0, part.end_col_offset or 0)))
    return spans


def read_survivors(stored: Path) -> list[Mutant]:
    """Return the mutants that survived in another run, for other tests."""
    mutants = []
    for outcome in json.loads(stored.read_text()):
        if outcome["end"] == "survived":
            mutants.append(Mutant(**outcome["mutant"]))
    return mutants


# -- the tests of a line ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TestCoverage:
    """The tests that pass through each line, and what each test takes."""

    lines: CoverageData
    seconds: Seconds

    def tests_of(self, mutant: Mutant) -> Seconds:
        """Return the shortest tests through a mutant's statement, in `MAX_SECONDS` together.

        Of what runs at import, also that of a test, these are the tests of its module.
        """
        tests_by_line = self.lines.contexts_by_lineno(str(ROOT / mutant.module))
        tests: set[str] = set()
        for line in find_statement_lines(mutant):
            tests.update(tests_by_line.get(line, ()))
        if not tests or "" in tests:
            tests = set().union(*tests_by_line.values())
        shortest: Seconds = {}
        total = 0.0
        for name in sorted(tests - {""}, key=self.seconds.__getitem__):
            total += self.seconds[name]
            if total >= MAX_SECONDS:
                break
            shortest[name] = self.seconds[name]
        return shortest


def find_statement_lines(mutant: Mutant) -> range:
    """Return the lines of the innermost statement with a mutant; of a block, those of its head."""
    line = mutant.position[0]
    innermost = range(line, line + 1)
    length = math.inf
    for node in ast.walk(ast.parse((ROOT / mutant.module).read_text())):
        if not isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            continue
        first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
        body = getattr(node, "body", None)
        last = body[0].lineno if body else node.end_lineno + 1
        lines = range(first, last)
        if line in lines and len(lines) < length:
            innermost = lines
            length = len(lines)
    return innermost


def measure_coverage(folder: str, tests: list[str], paths: list[str]) -> TestCoverage:
    """Run the tests once in a process of their own, and prepare the processes of mutants."""
    process = start_process("spawn", record_coverage, folder, tests, paths)
    process.join()
    if process.exitcode:
        sys.exit("The tests fail without any mutant.")
    lines = CoverageData(f"{folder}/lines")
    lines.read()
    record = json.loads(Path(folder, "record.json").read_text())
    multiprocessing.get_context("forkserver").set_forkserver_preload(record["modules"])
    return TestCoverage(lines, record["seconds"])


def record_coverage(folder: str, tests: list[str], paths: list[str]) -> None:
    """Run the tests, each as a context of coverage; write their seconds, and all imports.

    It runs in a process of its own.
    """
    import pytest

    sys.dont_write_bytecode = False  # else each process rewrites the assertions of all tests
    seconds: Seconds = defaultdict(float)

    class Recorder:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
            name = remove_parameters(item.nodeid)
            coverage.switch_context(name)
            start = measure_cpu_seconds()
            is_handled = yield
            seconds[name] += measure_cpu_seconds() - start
            return is_handled

    coverage = Coverage(data_file=f"{folder}/lines", include=paths)
    coverage.start()
    status = pytest.main([*PYTEST, *tests], plugins=[Recorder()])
    coverage.stop()
    coverage.save()
    modules = []
    for name in sys.modules:
        # the names are one argument of a command, which must not be too long: no deeper ones
        if name.count(".") < 2 and name.partition(".")[0] not in OURS:
            modules.append(name)
    record = {"seconds": seconds, "modules": modules}
    Path(folder, "record.json").write_text(json.dumps(record))
    os._exit(int(status))


def measure_cpu_seconds() -> float:
    """Return what this process, and those that it has waited for, have taken of the processors.

    It is not the time of a clock, by which a mutant would have fewer tests on a busy machine.
    """
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def remove_parameters(name: str) -> str:
    """Return the name of a test without its parameters."""
    return name.partition("[")[0]


# -- running ---------------------------------------------------------------------------------------


def judge_mutant(mutant: Mutant, coverage: TestCoverage) -> Outcome:
    """Run the tests of a mutant."""
    start = time.perf_counter()
    difference = mutant.difference()
    tests = coverage.tests_of(mutant)
    end = "survived"
    if tests:
        process = start_process("forkserver", run_tests, mutant, mutant.source(), tests)
        process.join(SECONDS_OF_WAITING)
        if process.is_alive():
            process.kill()
            end = "timeout"
        elif process.exitcode < 0:
            end = "timeout"
        elif process.exitcode > 0:
            end = "killed"
    return Outcome(mutant, end, difference, time.perf_counter() - start)


def start_process(method: str, target: Any, *arguments: Any) -> Any:
    process: Any = multiprocessing.get_context(method).Process(target=target, args=arguments)
    process.start()
    return process


def run_tests(mutant: Mutant, source: str, seconds: Seconds) -> None:
    """Run tests with a mutant in place of its module; the exit status is that of pytest.

    It runs in a process of its own.
    """
    import pytest

    sys.dont_write_bytecode = False  # else each process rewrites the assertions of all tests

    class MutantLoader(SourceFileLoader):
        def get_code(self, fullname: str) -> Any:
            return compile(source, self.path, "exec")

    class MutantFinder:
        @staticmethod
        def find_spec(name: str, path: Any, target: Any = None) -> Any:
            if name == mutant.module.removesuffix(".py").replace("/", "."):
                return spec_from_file_location(name, file, loader=MutantLoader(name, file))
            return None

    class ShortestFirst:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            chosen = [item for item in items if remove_parameters(item.nodeid) in seconds]
            items[:] = sorted(chosen, key=lambda item: seconds[remove_parameters(item.nodeid)])

    file = str(ROOT / mutant.module)
    sys.meta_path.insert(0, MutantFinder())
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    # of processors, not of a clock: the machine may be busy
    limit = 15 + int(sum(seconds.values()))
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    files = sorted({name.partition("::")[0] for name in seconds})
    os._exit(int(pytest.main([*PYTEST, *files], plugins=[ShortestFirst()])))


# -- the report ------------------------------------------------------------------------------------


def print_report(outcomes: list[Outcome]) -> None:
    """Print the survivors, and a table."""
    by_module: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        mutant = outcome.mutant
        by_module[mutant.module].append(outcome)
        if outcome.end != "killed":
            place = f"{mutant.module}:{mutant.position[0]}"
            print(f"\n{outcome.end}: {place} {mutant.operator}\n{outcome.difference}")
    print()
    for module in sorted(by_module):
        print_share(module, by_module[module])
    print_share("all", outcomes)


def print_share(name: str, outcomes: list[Outcome]) -> None:
    """Print how many of some mutants were killed."""
    killed = sum(not outcome.survived for outcome in outcomes)
    print(f"{name:20} {killed:4} of {len(outcomes):4} killed, {killed / len(outcomes):.1%}")


if __name__ == "__main__":
    typer.run(main)
