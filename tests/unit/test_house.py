"""What CONTRIBUTING.md and docs/how-it-works.md say about the rooms of mmkit is true."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.pages import ROOT

MMKIT = ROOT / "mmkit"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
HOW_IT_WORKS = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")

NO_ROOMS = {"__init__", "__main__", "generated"}
"""The exports, the command's entry, and the package in which generated classes appear."""


def find_rooms() -> set[str]:
    """Return the modules and packages right below mmkit."""
    modules = {path.stem for path in MMKIT.glob("*.py")}
    packages = {path.parent.name for path in MMKIT.glob("*/__init__.py")}
    return (modules | packages) - NO_ROOMS


def read_section(page: str, heading: str) -> str:
    """Return a section of a page, up to the next heading."""
    (section,) = re.findall(rf"(?ms)^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", page)
    return section


def test_the_map_of_contributing_names_every_room_once() -> None:
    table = read_section(CONTRIBUTING, "The map").split("| to add |")[0]
    names = []
    for cell in re.findall(r"(?m)^\| (`.*?) \|", table):
        names += re.findall(r"`([\w_]+)/?`", cell)
    assert sorted(names) == sorted(find_rooms())


def test_the_import_contract_names_every_room_in_the_order_of_the_map() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    assert contract["exhaustive"]
    layers = []
    for layer in contract["layers"]:
        layers += layer.split(" | ")
    assert set(layers) == find_rooms()
    assert not settings["tool"]["importlinter"]["exclude_type_checking_imports"]


# -- the classes of docs/how-it-works.md -----------------------------------------------------------------------------


def list_concepts(heading: str) -> list[tuple[str, str]]:
    """Return the classes of a table, each with its module."""
    return re.findall(r"(?m)^\| `(\w+)` \| `([\w.]+)` \|", read_section(HOW_IT_WORKS, heading))


@pytest.mark.parametrize(
    ("heading", "most"),
    [
        pytest.param("When a spec is bound", 25, id="bind"),
        pytest.param("When a request runs", 30, id="request"),
    ],
)
def test_few_classes_are_met(heading: str, most: int) -> None:
    concepts = list_concepts(heading)
    assert 15 < len(concepts) <= most
    assert len(set(concepts)) == len(concepts)


CONCEPTS = sorted(set(list_concepts("When a spec is bound") + list_concepts("When a request runs")))


@pytest.mark.parametrize(("name", "module"), CONCEPTS)
def test_each_class_is_where_the_page_says(name: str, module: str) -> None:
    path = MMKIT.joinpath(*module.split("."))
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    assert name in {class_name for file in files for class_name in list_classes(file)}


def list_classes(file: Path) -> list[str]:
    """Return the names of the classes at the top of a module, which is read and not imported."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


# -- the words of docs/concepts.md -----------------------------------------------------------------------------------

OTHER_WORDS = {
    "alternative": "an update with its target is a ResolvedUpdate",
    "alternatives": "the layout of an item with its updates is an ItemLayout",
    "reading": "how a prompt is read is a PromptForm",
    "taken": "items that are processed together are an ItemBatch",
    "intake": "what parses items is an ItemParser",
    "leaf": "what an expression reads is a Dependency",
}
"""Words that the code once had for things that have a name in the glossary."""


def test_no_class_or_function_has_a_second_word_for_a_thing() -> None:
    second_words = []
    for file in sorted(MMKIT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            words = re.findall(r"[A-Z]?[a-z]+", node.name)
            for word in words:
                if word.lower() in OTHER_WORDS:
                    second_words.append(f"{file.relative_to(ROOT)}: {node.name}: {OTHER_WORDS[word.lower()]}")
    assert not second_words


def test_a_placeholder_is_a_token_and_nothing_else() -> None:
    """The evaluated layout of an item, its evaluator and the like have other names."""
    classes = [name for file in MMKIT.rglob("*.py") for name in list_classes(file)]
    about_the_token = {"PlaceholderGuard", "PlaceholderMask"}  # which keep it out of prompts, and out of samples
    assert {name for name in classes if "Placeholder" in name} == about_the_token


# -- the steps of a request ------------------------------------------------------------------------------------------

PIPELINE = (MMKIT / "vllm_api" / "pipeline.py").read_text(encoding="utf-8")
WALKTHROUGH = (ROOT / "tests" / "unit" / "test_walkthrough.py").read_text(encoding="utf-8")

STEPS = re.findall(r"(?m)^\*\*(\d+)\. ([\w ]+)\*\* \(`(?:\w+\.)?(\w+)`\)", HOW_IT_WORKS)
"""The number, the title and the function of each step, as the page has them."""


def test_the_steps_of_the_page_are_numbered_in_order() -> None:
    assert [int(number) for number, _, _ in STEPS] == list(range(1, 12))


def test_the_pipeline_has_the_numbers_of_the_page() -> None:
    steps = {number: function for number, _, function in STEPS}
    listed = re.findall(r"(?m)^ {8}(\d+)\. `(\w+)`", PIPELINE)
    assert [int(number) for number, _ in listed] == list(range(2, 9))
    assert all(steps[number] == function for number, function in listed)
    titles = {number: title.lower() for number, title, _ in STEPS}
    headings = re.findall(r"(?m)^# -- (\d+): ([a-z ]+) -", PIPELINE)
    assert [number for number, _ in headings] == [number for number, _ in listed]
    assert all(titles[number] == heading for number, heading in headings)


def test_the_walkthrough_has_the_numbers_of_the_page() -> None:
    titles = {number: title.lower().replace(" ", "_") for number, title, _ in STEPS}
    tests = re.findall(r"def test_step_(\d+)_(\w+)\(", WALKTHROUGH)
    assert len(tests) > 4
    assert all(name.startswith(titles[number]) for number, name in tests)


# -- the calls of a chat request -------------------------------------------------------------------------------------

CALLS_TABLE = read_section(HOW_IT_WORKS, "The calls of a chat request")
CALLS = re.findall(r"(?m)^\| (?:([\d to]+) )?\| `([\w.]+)` \| `([\w.]+)` \|", CALLS_TABLE)
"""The steps, the function and the module of each call that is not vLLM's."""


def test_the_calls_of_a_chat_request_have_the_numbers_of_the_steps() -> None:
    steps = {number: function for number, _, function in STEPS}
    numbered = {number: call.rpartition(".")[2] for number, call, _ in CALLS if number}
    assert numbered == {number: steps[number] for number in ("1", "9", "10", "11")} | {"2 to 8": "run"}
    assert [number for number, _, _ in CALLS if number] == ["1", "2 to 8", "9", "10", "11"]


@pytest.mark.parametrize(("call", "module"), [(call, module) for _, call, module in CALLS])
def test_each_call_is_where_the_page_says(call: str, module: str) -> None:
    assert call in list_functions(MMKIT.joinpath(*module.split(".")).with_suffix(".py"))


def test_the_head_of_bodies_lists_the_calls_in_the_order_of_the_page() -> None:
    head = ast.get_docstring(ast.parse((MMKIT / "serve" / "bodies.py").read_text(encoding="utf-8"))) or ""
    places = [head.index(call) for _, call, _ in CALLS]
    assert places == sorted(places)


def list_functions(file: Path) -> set[str]:
    """Return the functions of a module, and the methods as ``Class.method``."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.update(f"{node.name}.{name}" for name in list_methods(node))
    return names


def list_methods(class_node: ast.ClassDef) -> list[str]:
    """Return the names of the methods of a class, those under a condition too."""
    return [node.name for node in ast.walk(class_node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
