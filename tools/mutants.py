"""Do the tests notice a change of the pure core? Mutation testing with the operators of cosmic-ray.

    python -m tools.mutants --sample 400 --seed 16 --store out/mutants.json

A place is a position of the source where an operator of cosmic-ray applies, outside of annotations.
The seed draws the places, and one mutant for each. First the tests run once, to see which of them
pass through which function. Then every mutant is written into a copy of the checkout, and the tests
of its function run there until one fails: the mutant is killed. Each mutant has a process of its
own, a fork of one that has imported what takes long.
"""

import ast
import difflib
import json
import multiprocessing
import os
import random
import shlex
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from coverage import Coverage, CoverageData
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
MODULES = """\
expr layout field items/base items/tensor items/media updates placement process spec
bound/intake bound/processing bound/placeholders bound/modality plan"""
TESTS = "tests/unit tests/path"
NOT_COPIED = (
    ".git",
    ".venv",
    ".*cache",
    ".hypothesis",
    "out",
    "site",
    "build",
    "dist",
    "__pycache__",
)
IMPORTED_BEFORE = (
    "torch",
    "transformers",
    "vllm.multimodal.processing",
    "hypothesis.extra.numpy",
    "pytest",
)
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "60")
"""A test that takes a minute is in a loop that the mutant made, and fails."""
EQUIVALENT = ("Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")
"""Of None, booleans, small integers and classes, which is what is compared here, these say the
same."""

Position = tuple[int, int]
Lines = tuple[int, int]


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


# -- mutants ---------------------------------------------------------------------------------------


def mutants_of(module: str) -> Iterator[Mutant]:
    """All mutants of a module, but for those of annotations, which no test can notice."""
    source = (ROOT / module).read_text()
    annotations = spans_of_annotations(source)
    nodes = list(ast_nodes(get_ast(source)))
    for name in sorted(plugins.operator_names()):
        kind = plugins.get_operator(name)
        if kind.arguments() or name.endswith(EQUIVALENT):
            continue
        positions = (at for node in nodes for at in kind().mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if not any(first <= start < last for first, last in annotations):
                yield Mutant(module, start, name, occurrence)


def spans_of_annotations(source: str) -> list[tuple[Position, Position]]:
    """Where annotations and type aliases stand."""
    spans = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.arg(annotation=ast.expr() as part) | ast.FunctionDef(returns=ast.expr() as part)
            ):
                spans.append(part)
            case ast.AnnAssign(annotation=ast.Name(id="TypeAlias"), value=ast.expr() as part):
                spans.append(part)
            case ast.AnnAssign(annotation=part):
                spans.append(part)
    return [
        ((it.lineno, it.col_offset), (it.end_lineno or 0, it.end_col_offset or 0)) for it in spans
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


# -- the tests of a function -----------------------------------------------------------------------


def covered(tree: Path, tests: str, modules: list[str]) -> CoverageData:
    """Run the tests once: which of them passes through which line."""
    process = multiprocessing.get_context("forkserver").Process(
        target=cover, args=(tree, tests, modules)
    )
    process.start()
    process.join()
    if process.exitcode:
        sys.exit("The tests fail without any mutant.")
    lines = CoverageData(str(tree / "coverage.data"))
    lines.read()
    return lines


def cover(tree: Path, tests: str, modules: list[str]) -> None:
    """In a process of its own: each test is a context, without its parameters."""
    import pytest

    class Contexts:
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_setup(self, item: pytest.Item) -> None:
            coverage.switch_context(item.nodeid.partition("[")[0])

    enter(tree)
    coverage = Coverage(data_file=str(tree / "coverage.data"), include=modules)
    coverage.start()
    status = pytest.main([*PYTEST, *shlex.split(tests)], plugins=[Contexts()])
    coverage.stop()
    coverage.save()
    os._exit(int(status))


def tests_of(mutant: Mutant, lines: CoverageData, tree: Path, tests: str) -> list[str]:
    """The tests that pass through its function; all of them for what runs at import."""
    span = function_around(mutant)
    by_line = lines.contexts_by_lineno(str(tree / mutant.module))
    if span is None:
        return shlex.split(tests)
    first, last = span
    contexts = {each for line, of in by_line.items() if first <= line <= last for each in of}
    return sorted(filter(None, contexts))


def function_around(mutant: Mutant) -> Lines | None:
    """First and last line of the innermost function with a mutant."""
    line = mutant.position[0]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / mutant.module).read_text())
    spans = [(it.lineno, it.end_lineno or 0) for it in ast.walk(tree) if isinstance(it, functions)]
    return max((span for span in spans if span[0] <= line <= span[1]), default=None)


# -- running ---------------------------------------------------------------------------------------


def run(tree: Path, nodes: list[str]) -> None:
    """In a process of its own: the exit status is that of pytest."""
    import pytest

    enter(tree)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    statuses = (pytest.main([*PYTEST, *part]) for part in (quick(nodes), slow(nodes)) if part)
    os._exit(int(next(filter(None, statuses), 0)))


def quick(nodes: list[str]) -> list[str]:
    """Those without vLLM, which run first."""
    return [node for node in nodes if node.startswith("tests/unit")]


def slow(nodes: list[str]) -> list[str]:
    return [node for node in nodes if node not in set(quick(nodes))]


def enter(tree: Path) -> None:
    """Take a copy of the checkout for the current one."""
    os.chdir(tree)
    os.environ.update(variables())
    sys.path.insert(0, str(tree))


def judge(mutant: Mutant, tree: Path, nodes: list[str], limit: float) -> Outcome:
    """Run tests on a copy of the checkout that has the mutant."""
    with written(mutant, tree):
        process = multiprocessing.get_context("forkserver").Process(target=run, args=(tree, nodes))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
            end = "timeout"
        else:
            end = "killed" if process.exitcode else "survived"
    return Outcome(mutant, end, mutant.difference())


@contextmanager
def written(mutant: Mutant, tree: Path) -> Iterator[None]:
    path = tree / mutant.module
    path.write_text(mutant.source())
    try:
        yield
    finally:
        shutil.copy(ROOT / mutant.module, path)


@cache
def variables() -> dict[str, str]:
    """Failing examples are not made smaller, and nothing is written beside the sources."""
    return os.environ | {"HYPOTHESIS_PROFILE": "mutants", "PYTHONDONTWRITEBYTECODE": "1"}


def main(
    size: Annotated[int, typer.Option("--sample", help="how many mutants")] = 400,
    seed: Annotated[int, typer.Option(help="which of them")] = 16,
    jobs: Annotated[int, typer.Option(help="how many at once")] = 2,
    limit: Annotated[float, typer.Option(help="seconds for all tests of a mutant")] = 1200,
    modules: Annotated[str, typer.Option(help="of mmkit")] = MODULES,
    tests: Annotated[str, typer.Option(help="arguments of pytest")] = TESTS,
    store: Annotated[Path | None, typer.Option(help="a JSON file for the outcomes")] = None,
) -> None:
    """Print the share of mutants that the tests kill, by module, and the survivors."""
    os.environ.update(variables())
    multiprocessing.get_context("forkserver").set_forkserver_preload([*IMPORTED_BEFORE])
    paths = [f"mmkit/{name}.py" for name in modules.split()]
    chosen = sample(paths, size, seed)
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            tree = Path(folder) / str(number)
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
            trees.put(tree)
        print("running the tests once", flush=True)
        first = Path(folder) / "0"
        lines = covered(first, tests, paths)

        def outcome(mutant: Mutant) -> Outcome:
            nodes = tests_of(mutant, lines, first, tests)
            if not nodes:
                return Outcome(mutant, "survived", mutant.difference())
            tree = trees.get()
            try:
                return judge(mutant, tree, nodes, limit)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            outcomes = list(tqdm(pool.map(outcome, chosen), total=len(chosen), unit="mutant"))
    if store:
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    report(outcomes)


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
