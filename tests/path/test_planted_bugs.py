"""Each law catches the bugs planted for it and says what is wrong; correct processors pass every law."""

from __future__ import annotations

import re

import pytest

from mmkit import testing
from mmkit.testing import LAWS, NotApplicable, check_law
from tests import ROOT
from tests.profiles import scaled

from .planted import BASES, BUGS, BY_NUMBER, NOTED, Bug, another_qwen, media, mixed, violation

EXAMPLES = 200
"""At most; every planted bug is found before, the same way each time."""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.law}-{bug.name}")
def test_bugs_are_caught(bug: Bug) -> None:
    """By the law that names them, in a message that says what is wrong, with a request that can be copied."""
    message = violation(bug.law, bug.subject(), EXAMPLES)
    assert message is not None, f"{bug.law} does not see it"
    assert message.startswith(f"{bug.law}: ")
    assert re.search(bug.message, message), message
    assert len(message.split("\n")[0]) < 600
    for line in message.split("\n"):
        if line.startswith("    in Request("):
            assert f"    in {_evaluated(line)!r}" == re.split(" after | beside ", line)[0]


def _evaluated(line: str) -> testing.Request:
    request = eval(re.split(" after | beside ", line)[0].removeprefix("    in "), vars(testing))
    assert isinstance(request, testing.Request)
    return request


@pytest.mark.parametrize("bug", [b for b in BUGS if b.name in ("range_off_by_one", "items_swapped_after_a_hit")])
def test_requests_are_shrunk(bug: Bug) -> None:
    """What is shown is about the smallest request, or the shortest sequence of them, that shows the bug."""
    message = violation(bug.law, bug.subject(), EXAMPLES, shrink=True) or ""
    assert message.count("TensorSample") <= 6, message
    assert "container='torch'" in message


@pytest.mark.parametrize("base", BASES)
def test_correct_processors_pass(base: str) -> None:
    subject = BASES[base]()
    for name, law in LAWS.items():
        if not {"mixed": True, "by hand": law.needs_model, "robot": not law.needs_model}[base]:
            continue  # the same processor as another, no model class
        try:
            check_law(law, subject, examples=scaled(40))
        except NotApplicable:
            # no Hugging Face processor, positions of one dimension; no tokenizer, no embeddings, no outputs
            assert name in ("reference", "positions") or (base == "robot" and name in ("text", "embeds", "outputs"))


def test_options_of_one_modality_pass() -> None:
    """Two modalities that share a processor, and options in the scope of one."""
    for law in ("identity", "independence", "cache"):
        check_law(law, media(), examples=scaled(60))


def test_correct_positions_pass() -> None:
    for subject in (another_qwen(), another_qwen(change=lambda inherited, *given: inherited(*given))):
        check_law("positions", subject, examples=scaled(40))


def test_the_table_in_the_docs_is_complete() -> None:
    """No law is idle, and no bug comes twice."""
    assert {bug.law for bug in BUGS} == set(LAWS)
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 34
    page = (ROOT / "docs/data/planted-bugs.md").read_text()
    rows = re.findall(r"^\| (.+?) \| .+? \| (\w+) \| `(.+?)` \|", page, re.MULTILINE)
    assert [row[:2] for row in rows] == [(bug.name.replace("_", " "), bug.law) for bug in BUGS]


def test_notes_that_spell_special_tokens_pass() -> None:
    for law in ("ranges", "cache", "identity", "refusal"):
        check_law(law, mixed(NOTED), examples=scaled(20))


def test_numbered_placeholders_pass() -> None:
    for law in ("ranges", "cache", "refusal", "idempotence"):
        check_law(law, mixed(BY_NUMBER), examples=scaled(40))
