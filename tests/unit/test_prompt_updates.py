"""Placing layouts in prompts, against naive.py and in examples."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mmkit import InputError, ModelSpec, Tensor, already_expanded, cfg, embed, insert, item, literal, replace, tok
from mmkit.language.expr import Scope
from mmkit.language.layout import nothing
from mmkit.language.vocabulary import Vocabulary
from mmkit.plan.placement import EMPTY, NotFound, place
from tests.profiles import scaled
from tests.spaced import make_spaced_tokenizer

from . import naive
from .common import CONFIG, Tokenizer, expect_refusal, make_item_layout, make_modality


def of_item(ways):
    _, _, ids, embeds = ways[0]
    assert all(way[2] == ids for way in ways)
    return make_item_layout(ids, [way[:2] for way in ways], embeds)


def run(prompt, items, reserved=EMPTY):
    """Place items with the ways of naive.py, and what comes out as it tells it; None where the request is refused."""
    before = list(prompt)
    known = {name: [of_item(ways) for ways in of] for name, of in items.items()}
    try:
        ids, placements = place(prompt, known, "spec", reserved)
    except InputError:
        return None
    finally:
        assert prompt == before, "the caller's prompt was changed"
    return ids, [(at.modality, at.index, at.start, at.tokens.ids) for at in placements]


# -- against the reference --------------------------------------------------------------------------------------------


@st.composite
def requests(draw):
    """Targets, layouts and text over four ids, where everything collides, or over many; often the target is the
    layout's placeholder. Most prompts are pieced together from what they may contain, or hold every layout."""
    small = st.integers(1, draw(st.sampled_from([4, 40])))
    expanded = draw(st.booleans())
    some = st.lists(small, min_size=1, max_size=3)
    items = {}
    pieces = [draw(st.lists(small, max_size=2))]
    for name in draw(st.sampled_from([("a",), ("a", "b"), ("b", "a"), ("a", "b", "c")])):
        kinds = draw(st.lists(st.sampled_from(["replace", "replace", "in_place", "start", "after"]), max_size=1))
        kinds = kinds or ["replace", draw(st.sampled_from(["replace", "in_place", "start", "after"]))]
        targets = [draw(some) if kind in ("replace", "after") else [] for kind in kinds]
        items[name] = []
        for _ in range(draw(st.sampled_from([1, 2, 3, 0]))):
            ids = draw(st.lists(small, min_size=1, max_size=3)) + draw(st.sampled_from([[], *targets]))
            embeds = {draw(st.sampled_from([ids[-1], *ids]))}
            items[name].append([(kind, target, ids, embeds) for kind, target in zip(kinds, targets, strict=True)])
            pieces.append(ids if expanded else draw(st.sampled_from([*targets, ids])))
            if draw(st.booleans()):
                pieces.append(draw(st.lists(small, max_size=2)))
    if draw(st.booleans()):
        pieces = draw(st.permutations(pieces))
    return [token for piece in pieces for token in piece], items, draw(st.lists(some, max_size=1))


@settings(max_examples=scaled(400))
@given(requests())
def test_agrees_with_the_naive_reference(request_):
    """Whatever is written, expanded, missing or too much. What is expanded is not expanded again."""
    prompt, items, reserved = request_
    result = run(prompt, items, {tuple(target): "a" for target in reserved})
    event("placed" if result else "refused")
    assert result == naive.place(prompt, items, reserved)
    if result and (again := run(result[0], items)):
        assert again[0] == result[0]


# -- examples --------------------------------------------------------------------------------------------------------

E = 9  # embeds


def only(kind, target, ids=(E, E)):
    return [(kind, target, list(ids), {E})]


@pytest.mark.parametrize(
    ("prompt", "items", "ids"),
    [
        ([1], {"a": only("start", []), "b": only("start", [], [8, E])}, [9, 9, 8, 9, 1]),
        ([1, 0, 1], {"a": only("replace", [1], [8, E]), "b": only("replace", [1])}, [8, 9, 0, 9, 9]),
        ([1, 0, 1], {"b": only("replace", [1]), "a": only("replace", [1], [8, E])}, [9, 9, 0, 8, 9]),
        ([1, 2], {"a": only("replace", [1, 2]) + only("replace", [1])}, [9, 9]),
        ([1, 3], {"a": only("replace", [1, 2]) + only("replace", [1])}, [9, 9, 3]),
        ([1, 2, 3], {"a": only("after", [1, 2]), "b": only("replace", [2, 3])}, None),
        ([7, 1, 8, 2], {"a": only("replace", [1]), "b": only("replace", [2], [7, 1, E])}, [7, 9, 9, 8, 7, 1, 9]),
        ([7, 1, 8, 2], {"a": only("replace", [1], [1, E]), "b": only("replace", [2], [7, 1, 8])}, None),
        ([7, 1, 8, 2], {"b": only("replace", [2], [7, 1, 8]), "a": only("replace", [1], [1, E])}, None),
        ([1, 2], {"a": only("replace", [1], [E]), "b": only("replace", [2], [1])}, [9, 1]),
    ],
)
def test_who_comes_first(prompt, items, ids):
    """Written out, as the reference may be wrong as well: modalities that share a target
    take it in the order of the spec, alternatives of an item in theirs; no anchor is inside a target, and no target
    inside a layout of another modality, unless targets are all of that layout."""
    result = run(prompt, {name: [ways] for name, ways in items.items()})
    assert (result and result[0]) == ids


# -- tokens that merge ------------------------------------------------------------------------------------------------


class Lines(Tokenizer):
    """One id per character, and one per run of line breaks, at most four."""

    def encode(self, text, add_special_tokens):
        runs = (match[0] for match in re.finditer(r"\n{1,4}|.", text))
        return [1000 + len(run) if run[0] == "\n" else ord(run) for run in runs]


LINES = Lines()
IN_LINES = make_modality(
    "image",
    item=Tensor(shape=(2,)),
    layout=tok.text("\n\n(") + embed(E) * 2 + tok.text(")\n\n"),
    update=replace(tok.text("@")),
)


@given(st.lists(st.sampled_from(["", "\n", "\n\n\n", "a\n", "a", "\nb"]), min_size=2, max_size=5))
def test_line_breaks_merge_as_in_a_text(gaps):
    plan = ModelSpec("lines", IN_LINES, merges="\n").bind(SimpleNamespace(vocab_size=2000), LINES)
    items = {"image": [torch.ones(2)] * (len(gaps) - 1)}
    expected = LINES.encode("\n\n(xx)\n\n".join(gaps).replace("x", chr(E)), False)
    written = [LINES.encode(gap, False) for gap in gaps]
    prompt = [*written[0], *(token for gap in written[1:] for token in [ord("@"), *gap])]
    preview = plan.preview(prompt, items)
    assert preview.prompt_token_ids == expected
    assert all(expected[at.start : at.end] == at.tokens.ids for at in preview.placements)
    assert all(at.tokens.num_embeds == 2 for at in preview.placements)
    assert gaps[0] or preview.placements[0].start == 0
    assert plan.preview(expected, items).placements == preview.placements
    assert plan.unexpand(expected, items) == prompt
    alone = [ord("a"), 1001, 1001]
    assert plan.expand(alone, {}) == plan.unexpand(alone, {}) == alone


# -- targets that are texts -------------------------------------------------------------------------------------------


def plan_of_text(tokenizer, text):
    """A plan whose items take two positions in place of a text."""
    update = replace(tok.text(text))
    graph = make_modality("graph", item=Tensor((2,)), layout=embed(tok["<p>"]) * 2, update=update)
    return ModelSpec("llaga", graph).bind(SimpleNamespace(vocab_size=len(tokenizer)), tokenizer)


TOKENIZERS = {
    "llama": make_spaced_tokenizer("always"),
    "llama, not stripped": make_spaced_tokenizer("always", strip=False),
    "llama, not legacy": make_spaced_tokenizer("first"),
    "no space": make_spaced_tokenizer("never"),
}
SOUGHT = {name: plan_of_text(own, "<graph>") for name, own in TOKENIZERS.items()}


def outside(preview):
    """The ids between the items of a prompt."""
    ends = [0, *(at.end for at in preview.placements)]
    starts = [*(at.start for at in preview.placements), len(preview.prompt_token_ids)]
    return [preview.prompt_token_ids[end:start] for end, start in zip(ends, starts, strict=True)]


@settings(max_examples=scaled(150))
@given(
    st.sampled_from([*SOUGHT]),
    st.lists(
        st.sampled_from(["", "x", ".", "..", ":", " ", "  ", "a ", " a", "\n", ")", "<", "é", "漢", "\ufffd", "x."]),
        min_size=2,
    ),
)
def test_a_text_is_found_wherever_it_stands(name, gaps):
    """And no id outside it changes: where a token reaches across its edge, those of the text before and after it stay,
    and the tokens beside it have the text that they had. A text and its ids are one prompt."""
    own, plan = TOKENIZERS[name], SOUGHT[name]
    text = "<graph>".join(gaps)
    ids = own(text).input_ids
    items = {"graph": [torch.ones(2)] * (len(gaps) - 1)}
    preview = plan.preview(text, items)
    assert plan.preview(ids, items).placements == preview.placements
    assert plan.expand(ids, items) == preview.prompt_token_ids
    parts = outside(preview)
    position = 0
    for number, part in enumerate(parts):
        inner = part[bool(number) : len(part) - (number < len(parts) - 1)]
        starts = range(position, len(ids) - len(inner) + 1)
        position = next(start for start in starts if ids[start : start + len(inner)] == inner) + len(inner)
        assert number or part[:-1] == ids[: len(part) - 1]
    assert parts[-1][1:] == ids[len(ids) - len(parts[-1][1:]) :]
    lead = own("x", add_special_tokens=False).input_ids
    texts = [own.decode([*lead, *part]).removeprefix(own.decode(lead)) for part in [parts[0][1:], *parts[1:]]]
    # the space before a text that stands alone is part of it
    without_space = re.compile(" *<graph>")
    assert without_space.sub("<graph>", "<graph>".join(texts)).strip() == without_space.sub("<graph>", text).strip()
    assert plan.expand(preview.prompt_token_ids, items) == preview.prompt_token_ids


@pytest.mark.parametrize("name", SOUGHT)
@pytest.mark.parametrize("gap", [" ", "", ".", "\n", ":", "x."])
def test_a_text_too_many_is_refused_wherever_it_stands(name, gap):
    for written in (f"a{gap}<graph>a <graph>", f"a <graph>a{gap}<graph>"):
        for prompt in (written, TOKENIZERS[name](written).input_ids):
            sentence = expect_refusal(
                InputError,
                "llaga.graph: expected 1 target '<graph>' in …, got 2. …",
                SOUGHT[name].expand,
                prompt,
                {"graph": torch.ones(2)},
            )
            assert "Write" in sentence
    assert SOUGHT[name].expand(f"a{gap}<graph>", {}) == TOKENIZERS[name](f"a{gap}<graph>").input_ids


def test_a_character_of_several_ids_is_a_target():
    """Also between characters that are such bytes, too."""
    for own in TOKENIZERS.values():
        plan = plan_of_text(own, "漢")
        for text in ("漢", "x漢", "é漢é", "a 漢 a", ":é漢"):
            before, after = text.split("漢")
            parts = outside(plan.preview(text, {"graph": torch.ones(2)}))
            lead = own("x", add_special_tokens=False).input_ids
            told = own.decode([*lead, *parts[0][1:]]).removeprefix(own.decode(lead))
            assert told.strip() == before.strip()
            assert own.decode([*lead, *parts[1]]) == own.decode(lead) + after


class Partial(Tokenizer):
    """Knows no text for one id."""

    def decode(self, ids, skip_special_tokens):
        if 9 in ids:
            raise OverflowError("no such token")
        return super().decode(ids, skip_special_tokens)


def test_an_id_that_the_tokenizer_cannot_decode_is_logged(caplog):
    """It is part of no target."""
    update = replace(tok.text("<graph>"))
    plan = ModelSpec("odd", make_modality("graph", item=Tensor((2,)), update=update)).bind(CONFIG, Partial())
    written = [*map(ord, "a<graph>")]
    assert plan.expand([9, *written], {"graph": torch.ones(2)}) == [9, ord("a"), 5]
    assert "cannot decode the ids [9]" in caplog.text
    sentence = "odd.graph: expected 1 target '<graph>' in the prompt for 1 item, got 0. …"
    expect_refusal(NotFound, sentence, plan.expand, [9, *written[:-1]], {"graph": torch.ones(2)})


# -- declarations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "target", "text"),
    [
        (replace(tok["<image>"]), (7,), "<image>"),
        (replace(tok.text("ab {}", item.index)), (97, 98, 32, 49), "ab 1"),
        (replace(lambda s: [s.item.index, 5]), (1, 5), None),
        (replace(tok["<|image_{}|>", item.index + 1]), (182,), "<|image_2|>"),
        (replace([tok["<image>"], tok["<im_end>"]]), (7, 8), "<image><im_end>"),
        (replace(cfg.bos), (3,), None),
        (replace(tok["<|image_{}|>", item.length]), (181,), None),
        (insert(at="start"), (), None),
        (insert(after=nothing), (), None),
        (insert(after=literal(tok.text("a"), 1)), (97, 1), None),
        (already_expanded(), (), None),
    ],
    ids=repr,
)
def test_resolving(update, target, text):
    """And the text that stands for an item in a chat message."""
    scope = Scope(cfg={"bos": 3}, tok=Vocabulary(Tokenizer()), item=SimpleNamespace(index=1, length=1))
    assert update.resolve_target(scope) == target
    assert update.bind(Scope(cfg=scope.cfg, tok=scope.tok)).resolve_target(scope) == target
    for updates in (update, [insert(at="start"), update]):
        spec = ModelSpec("robot", make_modality("image", update=updates))
        assert spec.placeholder_text("image", 1) == text
        assert spec.placeholder_text("video", 1) is None
