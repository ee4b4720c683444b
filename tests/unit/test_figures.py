"""The figures of the summary pages are those of the data, and there are no others."""

import re
from pathlib import Path

import pytest

from tests import ROOT
from tools.figures import PAGES, FigureError, read_figures, write_figures

FIGURES = read_figures()

SUMMARIES = [ROOT / "README.md", ROOT / "docs" / "evidence.md", ROOT / "docs" / "status.md"]
"""Pages on which each number comes from the data, or is one of these."""

NO_FIGURES = [
    r"\bv?0\.\d+(\.\d+)?\b",  # releases of vLLM
    r"\b(Python|PyTorch|transformers) \d+(\.\d+)?( to 3\.\d+)?",
    r"\bissue \d+",
    r"[\w-]*[A-Za-z]-?\d+[\w.-]*",  # names: H200, BLIP-2, x86-64
    r"\d-[A-Z]|\bGemma \d|\b(id|temperature is) 0",
    r"3\.5 GB|7\.3 GB|3 minutes|10 minutes|1\.0",  # what a set-up and its tests take
    r"\b12 numbers|\bfindings? [\d, and]+",
]

_HIDDEN = re.compile(
    r"^ *(?P<fence>```+).*?^ *(?P=fence)|`[^`]*`|<!--[a-z][\w.-]*-->.*?<!--/-->|<!--.*?-->|\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)


def name_page(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_the_figures_of_a_page_are_those_of_the_data(page: Path) -> None:
    """`python -m tools.figures` writes them."""
    text = page.read_text(encoding="utf-8")
    assert text == write_figures(text, FIGURES)


@pytest.mark.parametrize("page", SUMMARIES, ids=name_page)
def test_a_summary_has_no_figure_that_no_program_wrote(page: Path) -> None:
    assert find_other_numbers(page.read_text(encoding="utf-8")) == []


def find_other_numbers(text: str) -> list[str]:
    """Return the numbers of a page outside of code and links that no program wrote."""
    shown = _HIDDEN.sub(" ", text)
    for pattern in NO_FIGURES:
        shown = re.sub(pattern, " ", shown)
    return re.findall(r"\S*\d\S*", shown)


def test_each_table_of_a_benchmark_stands_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in FIGURES:
        assert not name.startswith("table.") or f"<!--{name}-->" in pages


def test_a_stale_figure_is_written_anew_and_a_number_without_data_is_found() -> None:
    text = "They have <!--bugs-->20<!--/--> bugs in `3` processors, and 7 more.\n"
    assert write_figures(text, {"bugs": "21"}) == text.replace("20", "21")
    assert find_other_numbers(text) == ["7"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("of <!--bogs-->20<!--/-->", "bogs: expected one of bugs"), ("of\n<!--bugs-->20<!--/-->", "a word before it")],
)
def test_a_figure_that_cannot_be_shown_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(FigureError, match=sentence):
        write_figures(text, {"bugs": "21"})
