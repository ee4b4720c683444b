"""Do the tests notice a change of the pure core? Mutation testing with the operators of cosmic-ray.

    python -m tools.mutants --sample 400 --seed 16 --store out/mutants.json

A place is a position of the source where an operator of cosmic-ray applies, outside of annotations.
The seed draws the places, and one mutant for each. Every mutant is written into a copy of the
checkout, where the stages of tests run until one fails: the mutant is killed. A mutant that passes
all stages, or a stage's time limit that is reached, is reported with its difference.
"""

import ast
import difflib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
MODULES = "expr layout fields items updates plan process spec"
STAGES = ("tests/unit", "tests/path")
NOT_COPIED = (".*", "out", "site", "build", "dist", "__pycache__")
Position = tuple[int, int]

EQUIVALENT = ("Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")
"""Of None, booleans, small integers and classes, which is what is compared here, these say the same."""


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
    """What became of a mutant: the stage that killed it, `timeout`, or `survived`."""

    mutant: Mutant
    by: str
    difference: str

    @property
    def killed(self) -> bool:
        return self.by != "survived"


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
            case ast.arg(annotation=ast.expr() as part) | ast.FunctionDef(returns=ast.expr() as part):
                spans.append(part)
            case ast.AnnAssign(annotation=ast.Name(id="TypeAlias"), value=ast.expr() as part):
                spans.append(part)
            case ast.AnnAssign(annotation=part):
                spans.append(part)
    return [((it.lineno, it.col_offset), (it.end_lineno, it.end_col_offset)) for it in spans]


def sample(modules: list[str], size: int, seed: int) -> list[Mutant]:
    """`size` mutants, each at another place; all places where there are fewer."""
    places: dict[tuple[str, Position], list[Mutant]] = defaultdict(list)
    for module in modules:
        for mutant in mutants_of(module):
            places[module, mutant.position].append(mutant)
    draw = random.Random(seed)
    chosen = draw.sample(sorted(places), min(size, len(places)))
    return [draw.choice(places[place]) for place in chosen]


def run(mutant: Mutant, tree: Path, stages: tuple[str, ...], limit: float) -> Outcome:
    """Run the stages on a copy of the checkout that has the mutant."""
    path = tree / mutant.module
    path.write_text(mutant.source())
    try:
        by = next(filter(None, (killer(stage, tree, limit) for stage in stages)), "survived")
    finally:
        shutil.copy(ROOT / mutant.module, path)
    return Outcome(mutant, by, mutant.difference())


def killer(stage: str, tree: Path, limit: float) -> str:
    """What a stage says: its name if a test failed, `timeout`, or nothing."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(stage)]
    try:
        ended = subprocess.run(command, cwd=tree, env=environment(), timeout=limit, capture_output=True)
    except subprocess.TimeoutExpired:
        return "timeout"
    return stage if ended.returncode else ""


@cache
def environment() -> dict[str, str]:
    """Failing examples are not made smaller, and nothing is written beside the sources."""
    return os.environ | {"HYPOTHESIS_PROFILE": "mutants", "PYTHONDONTWRITEBYTECODE": "1"}


def main(
    size: Annotated[int, typer.Option("--sample", help="how many mutants")] = 400,
    seed: Annotated[int, typer.Option(help="which of them")] = 16,
    jobs: Annotated[int, typer.Option(help="how many at once")] = 2,
    limit: Annotated[float, typer.Option(help="seconds that a stage may take")] = 600,
    modules: Annotated[str, typer.Option(help="of mmkit")] = MODULES,
    stage: Annotated[
        list[str] | None, typer.Option(help="arguments of pytest; the next stage follows if it passes")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="a JSON file for the outcomes")] = None,
) -> None:
    """Print the share of mutants that the tests kill, by module, and the survivors."""
    stages = tuple(stage or STAGES)
    chosen = sample([f"mmkit/{name}.py" for name in modules.split()], size, seed)
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            tree = Path(folder) / str(number)
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
            trees.put(tree)
        for each in stages:
            if killer(each, tree, limit):
                raise typer.Exit(f"{each}: fails without any mutant")

        def judge(mutant: Mutant) -> Outcome:
            tree = trees.get()
            try:
                return run(mutant, tree, stages, limit)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            outcomes = list(tqdm(pool.map(judge, chosen), total=len(chosen), unit="mutant"))
    if store:
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    report(outcomes)


def report(outcomes: list[Outcome]) -> None:
    """The survivors, and a table."""
    for one in outcomes:
        if not one.killed:
            print(f"\n{one.mutant.module}:{one.mutant.position[0]} {one.mutant.operator}\n{one.difference}")
    print()
    for module in sorted({one.mutant.module for one in outcomes}):
        print(share(module, [one for one in outcomes if one.mutant.module == module]))
    print(share("all", outcomes))


def share(name: str, outcomes: list[Outcome]) -> str:
    killed = sum(one.killed for one in outcomes)
    return f"{name:20} {killed:4} of {len(outcomes):4} killed, {killed / len(outcomes):.1%}"


if __name__ == "__main__":
    typer.run(main)
