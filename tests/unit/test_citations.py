"""What the pages cite exists: messages, variables, tests, files, programs, and targets of make.

A page cites a message in part, as `expected 3 encoder rows, got 2`, with `...` for what depends on a spec. Each such
part is in an error that is provoked here. Messages of vLLM's processes and of servers, which these tests do not start,
are made of texts that the source has.
"""

import ast
import re
from functools import cache

import numpy as np
import pytest
import torch

from mmkit import ModelSpec, Tensor, batched, between, cfg, embed, hf, item, replace, tok
from mmkit.plan.encoder_rows import split_encoder_rows
from mmkit.plan.model_methods import check_method
from tests.pages import PAGES, ROOT

from .common import CONFIG, bind_modality, bind_plan, make_modality

CITING_PAGES = [page for page in PAGES if "data" not in page.relative_to(ROOT).parts]
"""Without the results that programs have stored, which may be those of an earlier version."""

BLOCK = re.compile(r"^( *)(```+).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def list_spans(pages):
    """Return what pages set as code in their prose and tables, each with the name of its page."""
    spans = []
    for page in pages:
        prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for text in SPAN.findall(prose):
            spans.append((str(page.relative_to(ROOT)), text))
    return sorted(set(spans))


# -- messages ----------------------------------------------------------------------------------------------------------

OF_MESSAGE = re.compile(r"(?<![-\w])expected (?!\w+\.toml)| has no (value|truth value|text)\b")
"""How a part of a message is told from other code."""

CITED_MESSAGES = [span for span in list_spans(CITING_PAGES) if OF_MESSAGE.search(span[1])]

OF_OTHER_PROCESSES = {
    "vLLM ...: expected a method that vLLM calls, got no call of it": ("a method that vLLM calls", "no call of it"),
    "expected a method with the arguments (...), got none": ("a method with the arguments (…)", "none"),
    "session: expected at most ... open at once": ("session", "at most … open at once"),
    "expected a living engine": ("a living engine",),
}
"""Messages of the check of vLLM and of servers, with the texts of the source that they are made of."""


def process_in_reverse(items, scope):
    return {"x": list(items)[::-1]}


def return_one_batch(m, **options):
    return {"x": torch.stack(list(m))[None]}


def return_three_crops(m, **options):
    return {"x": torch.stack([crop for value in m for crop in [value] * 3])}


class WithoutMethod:
    """A model class without a method for the items."""


class WithOtherParameters:
    """A model class whose method takes another field."""

    def embed_m(self, values):
        return values


def parse(shape, value):
    return bind_modality(item=Tensor(shape), process=hf()).parser.parse_raw_items([value])


def preview(prompt, data, **options):
    return bind_plan(make_modality("m", **options)).preview(prompt, {"m": data})


def preview_by_hugging_face(processor, count):
    parts = dict(item=Tensor((3,)), fields={"x": batched()}, process=hf())
    plan = bind_plan(make_modality(**parts), processor=processor)
    return plan.preview([5] * count, {"m": [torch.zeros(3)] * count})


CAUSES = [
    lambda: parse((between(1, 64), 4), np.zeros((9, 2))),
    lambda: parse((between(1, 64), 4), np.zeros((1, 3))),
    lambda: parse((between(1, 64), 1), np.zeros((4, 2))),
    lambda: parse((between(1, 64),), [0.0, float("nan")]),
    lambda: preview([4], torch.zeros(2, 2), update=replace(tok.text("<image>"))),
    lambda: preview(
        [ord(letter) for letter in "<image><image>"], torch.zeros(2, 2), update=replace(tok.text("<image>"))
    ),
    lambda: bind_plan(make_modality("series")).preview([5], {"sensor": torch.zeros(2, 2)}),
    lambda: make_modality(layout=None, update=None, placeholder=5),
    lambda: bind_modality(item=Tensor((cfg.NAME,))),
    lambda: bind_modality(layout=embed(tok["<x>"])),
    lambda: ModelSpec("spec", make_modality(layout=embed(tok["<x>"]))).bind(CONFIG),
    lambda: min(cfg.n, 1),
    lambda: f"{cfg.n}",
    lambda: bind_modality(item=Tensor((between(1, 8), 4)), layout=embed(5) * (item.length // 4), update=replace(6)),
    lambda: bind_modality(item=Tensor((between(1, 8),)), process=process_in_reverse),
    lambda: preview_by_hugging_face(return_one_batch, 2),
    lambda: preview_by_hugging_face(return_three_crops, 1),
    lambda: bind_modality(fields={"x": batched(dtype="float16")}),
    lambda: check_method("spec, Model", WithoutMethod, "embed_m", ["x"]),
    lambda: check_method("spec, Model", WithOtherParameters, "embed_m", ["x"]),
    lambda: split_encoder_rows([torch.zeros(2, 3)], "spec.m, embed_m", [3], 3),
]


@cache
def provoke_messages():
    """Return the messages of all causes."""
    messages = []
    for cause in CAUSES:
        with pytest.raises((ValueError, TypeError)) as caught:
            cause()
        messages.append(str(caught.value))
    return messages


@cache
def read_source_texts():
    """Return the texts that the source of mmkit writes out, with `…` for what is put in at run time."""
    texts = set()
    for path in (ROOT / "mmkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.add("".join(parts))
    return texts


def is_part_of(citation, message):
    """Return whether a message has a part that a page cites; a server puts another path before it."""
    start = max(citation.find("expected "), 0)
    pattern = ".*".join(re.escape(words) for words in citation[start:].rstrip(".").split("..."))
    return re.search(pattern, message) is not None


@pytest.mark.parametrize(("page", "citation"), CITED_MESSAGES)
def test_mmkit_writes_each_message_that_a_page_cites(page, citation):
    if citation in OF_OTHER_PROCESSES:
        assert read_source_texts().issuperset(OF_OTHER_PROCESSES[citation])
    else:
        assert any(is_part_of(citation, message) for message in provoke_messages())


def test_every_cause_is_of_a_message_that_a_page_cites():
    assert len(CITED_MESSAGES) > 25
    for message in provoke_messages():
        assert any(is_part_of(citation, message) for _, citation in CITED_MESSAGES), message
    assert set(OF_OTHER_PROCESSES) <= {citation for _, citation in CITED_MESSAGES}


# -- names -------------------------------------------------------------------------------------------------------------

SOURCES = "".join(
    path.read_text(encoding="utf-8")
    for folder in ("mmkit", "tests", "examples", "tools", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
LIMITS = "".join((ROOT / "mmkit" / folder / "limits.py").read_text(encoding="utf-8") for folder in ("wire", "serve"))
LIMIT_NAMES = set(re.findall(r"(?m)^    (\w+): .*= ", LIMITS))
"""The fields of the limits of requests and of the server, each of which a variable sets."""

PAGE_TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
COMMANDS = "\n".join(PAGE_TEXTS.values())


@pytest.mark.parametrize("variable", sorted(set(re.findall(r"\bMMKIT_[A-Z_]*[A-Z]\b", COMMANDS))))
def test_mmkit_reads_each_variable_that_a_page_names(variable):
    limit = variable.removeprefix("MMKIT_SERVE_").lower()
    assert limit in LIMIT_NAMES or f'"{variable}"' in SOURCES or f"{variable}=" in MAKEFILE


def list_make_targets():
    """Return the targets in the consoles and in the prose of pages."""
    consoles = re.findall(r"(?ms)^ *```console\n(.*?)^ *```$", COMMANDS)
    commands = consoles + [text for _, text in list_spans(PAGES)]
    return sorted(set(re.findall(r"(?m)^ *make ([a-z][a-z-]+)", "\n".join(commands))))


@pytest.mark.parametrize("target", list_make_targets())
def test_make_has_each_target_that_a_page_names(target):
    assert re.search(rf"(?m)^{target}:", MAKEFILE)


def test_make_help_lists_each_target():
    (targets,) = re.findall(r"(?m)^\.PHONY: (.*)$", MAKEFILE)
    for target in targets.split():
        assert target == "help" or re.search(rf'"[^"]*\bmake {target}\b', MAKEFILE), target


OF_PROGRAM = re.compile(r"python -m ((?:examples|tools|benchmarks)[\w.]*)")


@pytest.mark.parametrize("module", sorted(set(OF_PROGRAM.findall(COMMANDS))))
def test_each_program_that_a_page_runs_exists(module):
    path = ROOT.joinpath(*module.split("."))
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


NAMED_PATHS = re.compile(r"(?:examples|tests|tools|docs|benchmarks|mmkit|requirements)/[\w./-]+")


@pytest.mark.parametrize(
    ("page", "path"),
    [(page, path) for page, span in list_spans(PAGES) for path in NAMED_PATHS.findall(span)],
)
def test_each_file_that_a_page_names_exists(page, path):
    """`mmkit examples` makes one folder more."""
    assert path == "examples/deploy" or (ROOT / path).exists()


@pytest.mark.parametrize(
    ("page", "name"),
    [(page, span) for page, span in list_spans(PAGES) if re.fullmatch(r"test_\w+", span)],
)
def test_each_test_that_a_page_names_exists(page, name):
    assert f"def {name}(" in SOURCES
