"""How a law says that it was asked about nothing, and that it broke. What laws find is in test_planted_bugs.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, find, reject, settings
from hypothesis import strategies as st

from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit import (
    Audio,
    Image,
    Modality,
    ModelSpec,
    Record,
    Tensor,
    Text,
    Video,
    batched,
    between,
    embed,
    item,
    testing,
    tok,
)
from mmkit import replace as replaces
from mmkit.language.expr import Scope
from mmkit.language.items import ItemType
from mmkit.testing import strategies
from tests.path.plain import plain
from tests.path.planted.base import checkpoint
from tests.profiles import scaled
from tests.random_specs import write_checkpoint
from tests.spaced import make_spaced_tokenizer
from tests.unit.common import expect_refusal

# Whether there is an example is the question, so none is shrunk.
UNSHRUNK = settings(phases=[Phase.generate], max_examples=2000, database=None)


def check_that_sizes_are_drawn(kind: ItemType, most: dict[str, int]) -> None:
    """Find items of the least and of the largest sizes, and of those beside them.

    Args:
        kind: an item type.
        most: the largest size in each dimension, by the name of the fact that has it.
    """
    bound = kind.bind(Scope())
    samples = strategies.items(bound)
    for name, last in most.items():
        for size in (1, 2, last - 1, last):
            find(samples, has_size(bound, name, size), settings=UNSHRUNK)


def has_size(bound: Any, name: str, size: int) -> Callable[[testing.Sample], bool]:
    """Return whether a sample has a size, as a function of the sample."""

    def check(sample: testing.Sample) -> bool:
        facts = bound.facts(bound.canonical(sample.value(), "item"), 0)
        return getattr(facts, name) == size

    return check


def test_drawn_images_reach_both_ends_of_their_sizes() -> None:
    check_that_sizes_are_drawn(Image(largest=(200, 100)), {"width": 200, "height": 100})


def test_drawn_videos_reach_both_ends_of_their_sizes() -> None:
    check_that_sizes_are_drawn(Video(largest=(4, 28, 28)), {"frames": 4, "width": 28, "height": 28})


def test_drawn_audio_reaches_both_ends_of_its_length() -> None:
    check_that_sizes_are_drawn(Audio(largest=1600, most=3200, rate=16000), {"length": 3200})


# -- verdicts of a law -------------------------------------------------------------------------------------------------


def check_on_plain_spec(check: Callable[[testing.Case], Any]) -> None:
    """Check a law that is not one of mmkit's."""
    subject = testing.of_spec(plain(), checkpoint())
    testing.check_law(testing.Law("none", check), subject, examples=5)


def test_a_law_that_rejects_all_requests_is_not_drawn() -> None:
    def reject_all(case: testing.Case) -> None:
        case.draw_request()
        reject()

    sentence = r"^none of \d+ drawn requests is one about which this law says anything"
    with pytest.raises(testing.NotDrawn, match=sentence):
        check_on_plain_spec(reject_all)


def test_a_law_that_rejects_nearly_all_requests_is_not_drawn() -> None:
    def reject_most(case: testing.Case) -> None:
        assume(case.draw(st.integers(0, 10**6)) % 97 == 5)

    with pytest.raises(testing.NotDrawn, match=r"^(holds on \d|none) of \d+ drawn requests"):
        check_on_plain_spec(reject_most)


def test_an_exception_of_a_law_is_an_error_of_the_kit() -> None:
    def break_down(case: testing.Case) -> None:
        raise RuntimeError("broken")

    with pytest.raises(testing.KitError, match=r"^none: RuntimeError: broken"):
        check_on_plain_spec(break_down)


def test_an_exception_of_the_processor_is_a_violation() -> None:
    def call_with_nothing(case: testing.Case) -> None:
        case.draw_request()
        case.subject.processor.apply(None, None)

    with pytest.raises(testing.Violation, match=r"^none: AttributeError: 'NoneType' object.*\n    in Request\("):
        check_on_plain_spec(call_with_nothing)


def test_a_field_that_contradicts_an_option_of_the_author_is_a_fault_of_the_spec() -> None:
    """Its author states the options, so that such a request is no refused one."""

    def cut(items: Any, scope: Any) -> dict[str, Any]:
        return {"frames": torch.stack(items)[..., : scope.kwargs.get("length")]}

    spec = plain(fields={"frames": batched(shape=(2, 3))}, process=cut)
    subject = testing.of_spec(spec, checkpoint(), kwargs=st.sampled_from([{}, {"length": 2}]))
    of_item = "plain.frames, fields['frames']: item 0: expected shape (2, 3) per item, got (2, 2)."
    sentence = f"plain, mm_processor_kwargs: {of_item}"
    where = "\n    in the processing of frames: …, mm_processor_kwargs {'length': 2}"

    def check_cache() -> None:
        testing.check_law("cache", subject, examples=20)

    expect_refusal(testing.Violation, f"cache: OptionsError: {sentence}{where}", check_cache)


def test_the_law_of_embeddings_does_not_apply_where_a_registered_processor_refuses_them() -> None:
    terra = testing.of_spec(TERRA, CHECKPOINT)
    samples = {"actions": strategies.items(terra.plan.modalities["actions"].item)}
    subject = testing.of_registered(CHECKPOINT, samples=samples)
    sentence = r"^embeddings are refused: terra\.actions\[0\]: expected a \(6, 3\) "
    with pytest.raises(testing.NotApplicable, match=sentence):
        testing.check_law("embeds", subject, examples=5)


def test_items_of_an_unknown_type_need_a_strategy() -> None:
    class Unknown(ItemType):
        expected = "something unknown"

    sentence = "items(): expected one of mmkit's item types, got Unknown. Give samples= a strategy for its modality."
    expect_refusal(TypeError, sentence, strategies.items, Unknown())


# -- a prompt that becomes ids again -----------------------------------------------------------------------------------

# The target is a text, as in many models of the first years.
GRAPHS = ModelSpec(
    "graphs",
    Modality(
        "graph",
        item=Tensor((2,)),
        layout=embed(tok["<p>"]) * 2,
        update=replaces(tok.text("<graph>")),
        fields={"graph": batched()},
    ),
)


class TextAndBack(GRAPHS.classes.processor):  # type: ignore[misc]
    """Makes a text of every prompt with items, and ids of it again."""

    def render(self, request: Any, *timer: Any) -> Any:
        result = super().render(request, *timer)
        ids = result["prompt_token_ids"]
        places = result["mm_placeholders"]["graph"]
        tokenizer = self.info.get_tokenizer()
        new_ids = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)
        first = places[0].offset
        shift = new_ids.index(ids[first]) - first
        moved = []
        for place in places:
            offset = place.offset + shift
            layout = ids[place.offset : place.offset + place.length]
            if new_ids[offset : offset + place.length] != layout:
                reject()
            moved.append(replace(place, offset=offset))
        return {**result, "prompt_token_ids": new_ids, "mm_placeholders": {"graph": moved}}


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with a tokenizer like that of Llama 2, which puts a space before each word."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = make_spaced_tokenizer("always")
    tokenizer.save_pretrained(folder)
    return write_checkpoint(folder, (), (), vocab_size=len(tokenizer), architectures=["MmkitMadeUp"])


NAMED = ModelSpec(
    "named",
    Modality(
        "graph",
        item=Record(name=Text(9), nodes=Tensor((between(1, 4), 2))),
        layout=tok.text("{} ", item.name.text) + embed(tok["<p>"]) * item.nodes.length,
        update=replaces(tok.text("<graph>")),
        fields={"nodes": batched()},
        process=lambda items, scope: {"nodes": [each_item["nodes"] for each_item in items]},
    ),
)


def test_a_layout_with_the_text_of_an_item_is_outlined_by_items_alone(llama_folder: Path) -> None:
    """The facts of a text are its length."""
    testing.check_law("outline", testing.of_spec(NAMED, llama_folder), examples=scaled(10))


@pytest.mark.parametrize("law", ["text", "ranges", "idempotence", "refusal"])
def test_a_target_that_is_a_text_holds_the_laws(law: str, llama_folder: Path) -> None:
    testing.check_law(law, testing.of_spec(GRAPHS, llama_folder), examples=scaled(40))


def test_a_prompt_that_becomes_text_and_ids_again_violates_the_law_of_texts(llama_folder: Path) -> None:
    classes = GRAPHS.classes._replace(processor=TextAndBack)
    subject = testing.of_spec(GRAPHS, llama_folder, classes=classes)
    with pytest.raises(testing.Violation, match="text: outside its items the prompt has"):
        testing.check_law("text", subject, examples=200)
