"""Each law catches the bugs planted for it and says what is wrong; correct processors pass every law."""

from __future__ import annotations

import re

import pytest

from mmkit import ModelSpec, hf, proc, testing
from mmkit.testing import LAWS, NotApplicable, check_law
from mmkit.testing.options import BYTES_OPTIONS
from tests import ROOT
from tests.profiles import scaled

from .planted.base import BASES, BY_NUMBER, LAID_OUT_NOTES, LISTED, NOTED, llava, make_mixed, media, qwen
from .planted.bug import Bug, violation
from .planted.huggingface import with_positions
from .planted.table import BUGS

EXAMPLES = 200
"""At most; every planted bug is found before, the same way each time."""

MAX_SENTENCE = 600


def name_bug(bug: Bug) -> str:
    return f"{bug.law}-{bug.name}"


WITHOUT_ENGINE = [bug for bug in BUGS if not LAWS[bug.law].needs_engine]
"""tests/night/test_one_class.py has the others."""


@pytest.mark.parametrize("bug", WITHOUT_ENGINE, ids=name_bug)
def test_a_bug_is_caught_by_its_law_in_a_message_that_says_what_is_wrong(bug: Bug) -> None:
    check_bug(bug)


def check_bug(bug: Bug) -> None:
    """Check that its law catches a bug, in one sentence."""
    message = violation(bug.law, bug.subject(), EXAMPLES)
    assert message is not None, f"{bug.law} does not see it"
    assert message.startswith(f"{bug.law}: ")
    assert re.search(bug.message, message), message
    lines = message.split("\n")
    assert len(lines[0]) < MAX_SENTENCE
    for line in lines:
        if line.startswith("    in Request("):
            check_that_a_request_can_be_copied(line)


def check_that_a_request_can_be_copied(line: str) -> None:
    """Evaluate the request in a line of a message, and compare its `repr` with the line."""
    source = re.split(" after | beside ", line)[0].removeprefix("    in ")
    request = eval(source, vars(testing))
    assert isinstance(request, testing.Request)
    assert repr(request) == source


def test_a_message_shows_the_smallest_request() -> None:
    """tests/night/test_planted_bugs.py has the shortest sequence of requests."""
    check_that_a_request_is_small("range_off_by_one")


def check_that_a_request_is_small(name: str) -> None:
    """Check that what a message shows of a bug is shrunk: few items, and of the plainest container."""
    (bug,) = [bug for bug in BUGS if bug.name == name]
    message = violation(bug.law, bug.subject(), EXAMPLES, shrink=True) or ""
    assert message.count("TensorSample") <= 6, message
    assert "container='torch'" in message


# -- correct processors ------------------------------------------------------------------------------------------------


def check_laws(base: str, laws: list[str], not_applicable: set[str]) -> None:
    """Check laws on a correct base, where only some may not apply."""
    subject = BASES[base]()
    for name in laws:
        try:
            check_law(name, subject, examples=scaled(8))
        except NotApplicable:
            assert name in not_applicable


def test_a_correct_spec_with_a_model_passes_all_laws() -> None:
    # it has no Hugging Face processor, positions of one dimension, rows for each item, and a class for vLLM
    check_laws("mixed", list(LAWS), {"reference", "positions", "ids_only", "logprobs"})


def test_a_correct_model_by_hand_passes_the_laws_of_models() -> None:
    check_laws("by hand", [name for name in LAWS if LAWS[name].needs_model], {"logprobs"})


def test_a_correct_spec_without_a_tokenizer_passes_the_laws_that_need_no_model() -> None:
    without_model = [name for name in LAWS if not LAWS[name].needs_model]
    check_laws("robot", without_model, {"reference", "positions", "text", "embeds", "outputs", "ids_only"})


@pytest.mark.parametrize("law", ["identity", "independence", "cache"])
def test_two_modalities_of_one_processor_pass_with_options_in_the_scope_of_one(law: str) -> None:
    check_law(law, media(), examples=scaled(60))


def test_correct_positions_of_vllm_pass() -> None:
    check_law("positions", qwen(), examples=scaled(40))


def test_correct_positions_of_the_mixin_pass() -> None:
    def compute_positions(correct, ids, items):
        return correct(ids, items)

    check_law("positions", with_positions(compute_positions), examples=scaled(40))


def test_pixels_as_bytes_pass_where_the_model_normalises_them() -> None:
    subject = llava(process=hf(proc.image_processor, kwargs=BYTES_OPTIONS))
    check_law("reference", subject, examples=scaled(8))


@pytest.mark.parametrize("law", ["ranges", "cache", "identity", "refusal"])
@pytest.mark.parametrize("spec", [NOTED, LAID_OUT_NOTES], ids=["fields", "layout"])
def test_notes_that_spell_special_tokens_pass(spec: ModelSpec, law: str) -> None:
    check_law(law, make_mixed(spec), examples=scaled(20))


@pytest.mark.parametrize("law", ["ranges", "worst_case", "identity", "refusal", "idempotence"])
def test_lists_and_absent_parts_pass(law: str) -> None:
    check_law(law, make_mixed(LISTED), examples=scaled(20))


@pytest.mark.parametrize("law", ["ranges", "cache", "refusal", "idempotence"])
def test_numbered_placeholders_pass(law: str) -> None:
    check_law(law, make_mixed(BY_NUMBER), examples=scaled(40))


# -- the table in the docs ---------------------------------------------------------------------------------------------


def test_no_law_is_without_a_bug() -> None:
    assert {bug.law for bug in BUGS} == set(LAWS)


def test_no_bug_comes_twice() -> None:
    names = {bug.name for bug in BUGS}
    assert len(names) == len(BUGS)


def test_the_table_in_the_docs_has_each_bug_with_its_law() -> None:
    page = (ROOT / "docs/data/planted-bugs.md").read_text()
    in_docs = re.findall(r"^\| (.+?) \| .+? \| (\w+) \| `.+?` \|", page, re.MULTILINE)
    planted = [(bug.name.replace("_", " "), bug.law) for bug in BUGS]
    assert sorted(in_docs) == sorted(planted)
