"""Placing layouts in prompts, against naive.py and in examples."""

import re
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mmkit import InputError, ModelSpec, Tensor, already_expanded, cfg, embed, insert, item, literal, replace, tok
from mmkit.language.expr import Scope
from mmkit.language.layout import nothing
from mmkit.language.vocabulary import Vocabulary
from mmkit.plan.placement import NO_TARGETS, ReservedTargets
from mmkit.plan.placing import find_overlapped, place
from mmkit.plan.placing_errors import LeftOver, NotFound
from mmkit.plan.spans import Span, Spans
from tests.profiles import scaled
from tests.spaced import make_spaced_tokenizer

from . import naive
from .common import CONFIG, Tokenizer, make_item_layout, make_modality, refuses


class Placing(NamedTuple):
    """What became of a prompt.

    Attributes:
        placed: as naive.place returns it; None where the prompt is refused.
        refusal: why, for whoever reads a failure of these tests.
    """

    placed: naive.PlacedPrompt | None
    refusal: InputError | None = None


def make_layout_of_updates(updates):
    """Return the ItemLayout of an item of naive.py."""
    layout, embed_ids = updates[0].layout, updates[0].embed_ids
    kinds_and_targets = []
    for update in updates:
        assert update.layout == layout
        kinds_and_targets.append((update.kind, update.target))
    return make_item_layout(layout, kinds_and_targets, embed_ids)


def place_with_mmkit(prompt, items, reserved=NO_TARGETS):
    """Place items of naive.py."""
    before = list(prompt)
    layouts = {}
    for name, items_of_modality in items.items():
        layouts[name] = [make_layout_of_updates(updates) for updates in items_of_modality]
    try:
        ids, placements = place(prompt, layouts, "spec", reserved)
    except InputError as refusal:
        return Placing(None, refusal)
    finally:
        assert prompt == before, "the caller's prompt was changed"
    placed = []
    for placement in placements:
        placed.append(naive.Placement(placement.modality, placement.index, placement.start, placement.tokens.ids))
    return Placing(naive.PlacedPrompt(ids, placed))


# -- against the reference --------------------------------------------------------------------------------------------

KINDS = st.sampled_from(["replace", "already_expanded", "start", "after"])
KINDS_MOSTLY_REPLACE = st.sampled_from(["replace", "replace", "already_expanded", "start", "after"])
MODALITY_NAMES = st.sampled_from([("a",), ("a", "b"), ("b", "a"), ("a", "b", "c")])


@st.composite
def requests(draw):
    """Targets, layouts and text over four ids, where everything collides, or over many; often the target is the
    layout's placeholder. Most prompts are pieced together from what they may contain, or hold every layout."""
    token = st.integers(1, draw(st.sampled_from([4, 40])))
    is_expanded = draw(st.booleans())
    few_ids = st.lists(token, min_size=1, max_size=3)
    text = st.lists(token, max_size=2)
    items = {}
    pieces = [draw(text)]
    for name in draw(MODALITY_NAMES):
        kinds = draw(st.lists(KINDS_MOSTLY_REPLACE, max_size=1))
        if not kinds:
            kinds = ["replace", draw(KINDS)]
        targets = [draw(few_ids) if kind in ("replace", "after") else [] for kind in kinds]
        items[name] = []
        for _ in range(draw(st.sampled_from([1, 2, 3, 0]))):
            ids = draw(few_ids) + draw(st.sampled_from([[]] + targets))
            embeds = {draw(st.sampled_from(ids[-1:] + ids))}
            updates = []
            for kind, target in zip(kinds, targets, strict=True):
                updates.append(naive.Update(kind, target, ids, embeds))
            items[name].append(updates)
            pieces.append(ids if is_expanded else draw(st.sampled_from(targets + [ids])))
            if draw(st.booleans()):
                pieces.append(draw(text))
    if draw(st.booleans()):
        pieces = draw(st.permutations(pieces))
    prompt = []
    for piece in pieces:
        prompt += piece
    reserved = draw(st.lists(few_ids, max_size=1))
    return prompt, items, reserved


@settings(max_examples=scaled(400))
@given(requests())
def test_agrees_with_the_naive_reference(request_):
    """Whatever is written, expanded, missing or too much. What is expanded is not expanded again."""
    prompt, items, reserved = request_
    placing = place_with_mmkit(prompt, items, ReservedTargets({tuple(target): "a" for target in reserved}))
    event("placed" if placing.placed else "refused")
    assert placing.placed == naive.place(prompt, items, reserved), placing.refusal
    if placing.placed is not None:
        again = place_with_mmkit(placing.placed.token_ids, items)
        assert again.placed is None or again.placed.token_ids == placing.placed.token_ids


# -- examples --------------------------------------------------------------------------------------------------------

E = 9  # receives an encoder row


def list_updates(*targets, ids=(E, E), kind="replace"):
    """Return the updates of an item of these ids: one for each of these targets."""
    return [naive.Update(kind, target, list(ids), {E}) for target in targets]


AT_START = list_updates([], kind="start")
IN_PLACE_OF_1 = list_updates([1])


@pytest.mark.parametrize(
    ("prompt", "items", "ids"),
    [
        pytest.param(
            [1],
            {"a": AT_START, "b": list_updates([], kind="start", ids=[8, E])},
            [9, 9, 8, 9, 1],
            id="modalities at the start stand in the order of the spec",
        ),
        pytest.param(
            [1, 0, 1],
            {"a": list_updates([1], ids=[8, E]), "b": IN_PLACE_OF_1},
            [8, 9, 0, 9, 9],
            id="modalities that share a target take it in the order of the spec",
        ),
        pytest.param(
            [1, 0, 1],
            {"b": IN_PLACE_OF_1, "a": list_updates([1], ids=[8, E])},
            [9, 9, 0, 8, 9],
            id="in another order of the spec, in that order",
        ),
        pytest.param([1, 2], {"a": list_updates([1, 2], [1])}, [9, 9], id="the first update of an item comes first"),
        pytest.param(
            [1, 3], {"a": list_updates([1, 2], [1])}, [9, 9, 3], id="the second one where the first is absent"
        ),
        pytest.param(
            [1, 2, 3],
            {"a": list_updates([1, 2], kind="after"), "b": list_updates([2, 3])},
            None,
            id="no anchor is inside a target",
        ),
        pytest.param(
            [7, 1, 8, 2],
            {"a": IN_PLACE_OF_1, "b": list_updates([2], ids=[7, 1, E])},
            [7, 9, 9, 8, 7, 1, 9],
            id="a part of a layout is no layout",
        ),
        pytest.param(
            [7, 1, 8, 2],
            {"a": list_updates([1], ids=[1, E]), "b": list_updates([2], ids=[7, 1, 8])},
            None,
            id="no target is inside a layout of another modality",
        ),
        pytest.param(
            [7, 1, 8, 2],
            {"b": list_updates([2], ids=[7, 1, 8]), "a": list_updates([1], ids=[1, E])},
            None,
            id="nor in another order of the spec",
        ),
        pytest.param(
            [1, 2],
            {"a": list_updates([1], ids=[E]), "b": list_updates([2], ids=[1])},
            [9, 1],
            id="unless targets are all of that layout",
        ),
    ],
)
def test_which_item_comes_first(prompt, items, ids):
    """Written out, as the reference may be wrong as well."""
    items_by_modality = {name: [updates] for name, updates in items.items()}
    placed, refusal = place_with_mmkit(prompt, items_by_modality)
    assert (None if placed is None else placed.token_ids) == ids, refusal


def test_the_first_layout_with_a_target_inside_is_named():
    items = {
        "a": [list_updates([1], ids=[1, E])] * 2,
        "b": [list_updates([2], ids=[6]), list_updates([3], ids=[5, 1, 4]), list_updates([0], ids=[7, 1, 8])],
    }
    placed, refusal = place_with_mmkit([7, 1, 8, 5, 1, 4, 2, 3, 0], items)
    assert placed is None
    assert "got [1] inside [5, 1, 4], a layout of b" in str(refusal)


# -- tokens that merge ------------------------------------------------------------------------------------------------


class LineTokenizer(Tokenizer):
    """One id per character, and one per run of line breaks, at most four."""

    def encode(self, text, add_special_tokens):
        ids = []
        for match in re.finditer(r"\n{1,4}|.", text):
            run = match[0]
            ids.append(1000 + len(run) if run[0] == "\n" else ord(run))
        return ids


@given(st.lists(st.sampled_from(["", "\n", "\n\n\n", "a\n", "a", "\nb"]), min_size=2, max_size=5))
def test_line_breaks_merge_as_in_a_text(gaps):
    tokenizer = LineTokenizer()
    image = make_modality(
        "image",
        item=Tensor(shape=(2,)),
        layout=tok.text("\n\n(") + embed(E) * 2 + tok.text(")\n\n"),
        update=replace(tok.text("@")),
    )
    plan = ModelSpec("lines", image, merges="\n").bind(SimpleNamespace(vocab_size=2000), tokenizer)
    items = {"image": [torch.ones(2)] * (len(gaps) - 1)}
    prompt = tokenizer.encode(gaps[0], False)
    for gap in gaps[1:]:
        prompt += tokenizer.encode("@", False) + tokenizer.encode(gap, False)
    expanded_text = "\n\n(xx)\n\n".join(gaps).replace("x", chr(E))
    expected = tokenizer.encode(expanded_text, False)

    preview = plan.preview(prompt, items)

    assert preview.prompt_token_ids == expected
    for placement in preview.placements:
        assert expected[placement.start : placement.end] == placement.tokens.ids
        assert placement.tokens.num_embeds == 2
    assert gaps[0] or preview.placements[0].start == 0
    assert plan.preview(expected, items).placements == preview.placements
    assert plan.unexpand(expected, items) == prompt
    without_items = [ord("a"), 1001, 1001]
    assert plan.expand(without_items, {}) == plan.unexpand(without_items, {}) == without_items


# -- targets that are texts -------------------------------------------------------------------------------------------


def plan_of_text(tokenizer, text):
    """Return a plan whose items take two positions in place of a text."""
    update = replace(tok.text(text))
    graph = make_modality("graph", item=Tensor((2,)), layout=embed(tok["<p>"]) * 2, update=update)
    return ModelSpec("llaga", graph).bind(SimpleNamespace(vocab_size=len(tokenizer)), tokenizer)


TOKENIZERS = {
    "llama": make_spaced_tokenizer("always"),
    "llama, not stripped": make_spaced_tokenizer("always", strip=False),
    "llama, not legacy": make_spaced_tokenizer("first"),
    "no space": make_spaced_tokenizer("never"),
}
PLANS = {name: plan_of_text(tokenizer, "<graph>") for name, tokenizer in TOKENIZERS.items()}
GRAPH = torch.ones(2)


def list_ids_between_items(preview):
    """Return the ids before the first item, between items, and after the last one."""
    parts = []
    end_of_last = 0
    for placement in preview.placements:
        parts.append(preview.prompt_token_ids[end_of_last : placement.start])
        end_of_last = placement.end
    parts.append(preview.prompt_token_ids[end_of_last:])
    return parts


def find_part(ids, part, start):
    """Return the end of the first place of a part in a list, from a position on; raise where there is none."""
    for position in range(start, len(ids) - len(part) + 1):
        if ids[position : position + len(part)] == part:
            return position + len(part)
    raise AssertionError(f"{part} is not in {ids[start:]}")


def decode_inside(tokenizer, ids):
    """Return the text of ids that stand inside a prompt: where they begin with a space, the space is not lost."""
    lead = tokenizer("x", add_special_tokens=False).input_ids
    return tokenizer.decode(lead + ids).removeprefix(tokenizer.decode(lead))


GAPS = st.sampled_from(["", "x", ".", "..", ":", " ", "  ", "a ", " a", "\n", ")", "<", "é", "漢", "\ufffd", "x."])


@settings(max_examples=scaled(150))
@given(st.sampled_from(list(PLANS)), st.lists(GAPS, min_size=2))
def test_a_text_is_found_wherever_it_stands(name, gaps):
    """And no id outside it changes: where a token reaches across its edge, those of the text before and after it stay,
    and the tokens beside it have the text that they had. A text and its ids are one prompt."""
    tokenizer = TOKENIZERS[name]
    plan = PLANS[name]
    text = "<graph>".join(gaps)
    ids = tokenizer(text).input_ids
    items = {"graph": [GRAPH] * (len(gaps) - 1)}

    preview = plan.preview(text, items)

    assert plan.preview(ids, items).placements == preview.placements
    assert plan.expand(ids, items) == preview.prompt_token_ids
    assert plan.expand(preview.prompt_token_ids, items) == preview.prompt_token_ids

    first, *between, last = list_ids_between_items(preview)
    assert first[:-1] == ids[: len(first) - 1]
    position = find_part(ids, first[:-1], 0)
    for part in between:
        position = find_part(ids, part[1:-1], position)
    find_part(ids, last[1:], position)
    assert last[1:] == ids[len(ids) - len(last[1:]) :]

    texts = [decode_inside(tokenizer, part) for part in [first[1:], *between, last]]
    # the space before a text that stands by itself is part of it
    without_space = re.compile(" *<graph>")
    assert without_space.sub("<graph>", "<graph>".join(texts)).strip() == without_space.sub("<graph>", text).strip()


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("gap", [" ", "", ".", "\n", ":", "x."])
def test_a_text_too_many_is_refused_wherever_it_stands(name, gap):
    plan = PLANS[name]
    tokenizer = TOKENIZERS[name]
    for text in (f"a{gap}<graph>a <graph>", f"a <graph>a{gap}<graph>"):
        for prompt in (text, tokenizer(text).input_ids):
            with refuses(LeftOver, "llaga.graph: expected 1 target '<graph>' in …, got 2. …") as caught:
                plan.expand(prompt, {"graph": GRAPH})
            assert "Write" in str(caught.value)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("gap", [" ", "", ".", "\n", ":", "x."])
def test_a_text_of_a_prompt_without_items_is_left_as_it_is(name, gap):
    text = f"a{gap}<graph>"
    assert PLANS[name].expand(text, {}) == TOKENIZERS[name](text).input_ids


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("text", ["漢", "x漢", "é漢é", "a 漢 a", ":é漢"])
def test_a_character_of_several_ids_is_a_target(name, text):
    """Also between characters that are such bytes, too."""
    tokenizer = TOKENIZERS[name]
    plan = plan_of_text(tokenizer, "漢")
    preview = plan.preview(text, {"graph": GRAPH})
    before, after = list_ids_between_items(preview)
    text_before, text_after = text.split("漢")
    assert decode_inside(tokenizer, before[1:]).strip() == text_before.strip()
    assert decode_inside(tokenizer, after) == text_after


class TokenizerWithoutNine(Tokenizer):
    """Knows no text for one id."""

    def decode(self, ids, skip_special_tokens):
        if 9 in ids:
            raise OverflowError("no such token")
        return super().decode(ids, skip_special_tokens)


def test_an_id_that_the_tokenizer_cannot_decode_is_logged(caplog):
    """It is part of no target."""
    update = replace(tok.text("<graph>"))
    plan = ModelSpec("odd", make_modality("graph", item=Tensor((2,)), update=update)).bind(
        CONFIG, TokenizerWithoutNine()
    )
    prompt = [9] + [ord(character) for character in "a<graph>"]
    assert plan.expand(prompt, {"graph": GRAPH}) == [9, ord("a"), 5]
    assert "cannot decode the ids [9]" in caplog.text
    sentence = "odd.graph: expected 1 target '<graph>' in the prompt for 1 item, got 0. …"
    with refuses(NotFound, sentence):
        plan.expand(prompt[:-1], {"graph": GRAPH})


# -- declarations ----------------------------------------------------------------------------------------------------


def resolve_index_and_five(scope):
    return [scope.item.index, 5]


@pytest.mark.parametrize(
    ("update", "target", "text"),
    [
        (replace(tok["<image>"]), (7,), "<image>"),
        (replace(tok.text("ab {}", item.index)), (97, 98, 32, 49), "ab 1"),
        (replace(resolve_index_and_five), (1, 5), None),
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
def test_the_target_of_an_update_and_its_text_in_a_chat_message(update, target, text):
    scope = Scope(cfg={"bos": 3}, tok=Vocabulary(Tokenizer()), item=SimpleNamespace(index=1, length=1))
    assert update.resolve_target(scope) == target
    assert update.bind(Scope(cfg=scope.cfg, tok=scope.tok)).resolve_target(scope) == target
    for updates in (update, [insert(at="start"), update]):
        spec = ModelSpec("robot", make_modality("image", update=updates))
        assert spec.placeholder_text("image", 1) == text
        assert spec.placeholder_text("video", 1) is None


# -- spans that overlap, against all pairs -----------------------------------------------------------------------------

SPANS = st.lists(st.builds(lambda start, length: Span(start, start + length), st.integers(0, 20), st.integers(0, 6)))


def find_overlapped_naively(spans, other):
    for span in sorted(spans):
        if set(range(*span)) & set(range(*other)):
            return span
    return None


@settings(max_examples=scaled(50))
@given(SPANS, SPANS)
def test_the_first_span_that_another_one_overlaps(spans, others):
    for other in others:
        if not other.is_anchor:
            assert Spans(spans).find_overlapped(other) == find_overlapped_naively(spans, other)


@settings(max_examples=scaled(50))
@given(st.text("ab", max_size=24), st.text("ab", min_size=1, max_size=5), SPANS)
def test_the_first_span_that_a_text_overlaps(prompt, text, spans):
    expected = None
    for start in range(len(prompt)):
        if expected is None and prompt.startswith(text, start):
            expected = find_overlapped_naively(spans, Span(start, start + len(text)))
    assert find_overlapped(prompt, text, Spans(spans)) == expected
