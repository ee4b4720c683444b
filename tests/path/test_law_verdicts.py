"""How a law says that it was asked about nothing, and that it broke. What laws find is in test_planted_bugs.py."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
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
    Tensor,
    Video,
    batched,
    embed,
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
from tests.spaced import spaced
from tests.unit.common import expect_refusal

UNSHRUNK = settings(phases=[Phase.generate], max_examples=2000, database=None)
"""Whether there is an example is the question."""


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (Image(largest=(200, 100)), {"width": 200, "height": 100}),
        (Video(largest=(4, 28, 28)), {"frames": 4, "width": 28, "height": 28}),
        (Audio(largest=1600, most=3200, rate=16000), {"length": 3200}),
    ],
)
def test_drawn_sizes_reach_both_ends(kind: Any, most: dict[str, int]) -> None:
    bound = kind.bind(Scope())
    drawn = strategies.items(bound)

    def size(sample: Any, name: str) -> int:
        return getattr(bound.facts(bound.canonical(sample.value(), "item"), 0), name)

    for name, last in most.items():
        for end in (1, 2, last - 1, last):
            assert find(drawn, lambda sample, name=name, end=end: size(sample, name) == end, settings=UNSHRUNK)


def nothing_to_say(case: testing.Case) -> None:
    case.draw_request()
    reject()


def rarely(case: testing.Case) -> None:
    assume(case.draw(st.integers(0, 10**6)) % 97 == 5)


def breaking(case: testing.Case) -> None:
    raise RuntimeError("broken")


def of_the_processor(case: testing.Case) -> None:
    case.draw_request()
    case.subject.processor.apply(None, None)


@pytest.mark.parametrize(
    ("check", "kind", "sentence"),
    [
        (nothing_to_say, testing.NotDrawn, r"none of \d+ drawn requests is one about which this law says anything"),
        (rarely, testing.NotDrawn, r"(holds on \d|none) of \d+ drawn requests"),
        (breaking, testing.KitError, "none: RuntimeError: broken"),
        (of_the_processor, testing.Violation, r"none: AttributeError: 'NoneType' object.*\n    in Request\("),
    ],
)
def test_a_law(check: Any, kind: type[Exception], sentence: str) -> None:
    subject = testing.of_spec(plain(), checkpoint())
    with pytest.raises(kind) as verdict:
        testing.check_law(testing.Law("none", check), subject, examples=5)
    assert re.match(sentence, str(verdict.value))


def test_a_field_that_an_option_contradicts() -> None:
    """Its author states the options, so that the spec is at fault: such a request is no refused one."""

    def cut(items: Any, scope: Any) -> dict[str, Any]:
        return {"frames": torch.stack(items)[..., : scope.kwargs.get("length")]}

    spec = plain(fields={"frames": batched(shape=(2, 3))}, process=cut)
    subject = testing.of_spec(spec, checkpoint(), kwargs=st.sampled_from([{}, {"length": 2}]))
    of_item = "plain.frames, fields['frames']: item 0: expected shape (2, 3) per item, got (2, 2)."
    sentence = f"plain, mm_processor_kwargs: {of_item}"
    where = "\n    in the processing of frames: …, mm_processor_kwargs {'length': 2}"
    law = partial(testing.check_law, examples=20)
    expect_refusal(testing.Violation, f"cache: OptionsError: {sentence}{where}", law, "cache", subject)


def test_embeddings_that_a_registered_processor_refuses() -> None:
    samples = {"actions": strategies.items(testing.of_spec(TERRA, CHECKPOINT).plan.modalities["actions"].item)}
    with pytest.raises(
        testing.NotApplicable, match=r"^embeddings are refused: terra\.actions\[0\]: expected a \(6, 3\) "
    ):
        testing.check_law("embeds", testing.of_registered(CHECKPOINT, samples=samples), examples=5)


def test_items_without_a_strategy() -> None:
    class Odd(ItemType):
        expected = "something odd"

    sentence = "items(): expected one of mmkit's item types, got Odd. Give samples= a strategy for its modality."
    expect_refusal(TypeError, sentence, strategies.items, Odd())


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
"""Its target is a text, as in many models of the first years."""


class Again(GRAPHS.classes.processor):  # type: ignore[misc]
    """Makes a text of every prompt with items, and ids of it again."""

    def render(self, request: Any, *timer: Any) -> Any:
        result = super().render(request, *timer)
        ids, places = result["prompt_token_ids"], result["mm_placeholders"]["graph"]
        tokenizer = self.info.get_tokenizer()
        again = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)
        shift = again.index(ids[places[0].offset]) - places[0].offset
        moved = [replace(place, offset=place.offset + shift) for place in places]
        for place, moved_place in zip(places, moved, strict=True):
            layout = ids[place.offset : place.offset + place.length]
            if again[moved_place.offset : moved_place.offset + place.length] != layout:
                reject()
        return {**result, "prompt_token_ids": again, "mm_placeholders": {"graph": moved}}


def test_a_prompt_that_becomes_ids_again_is_seen(tmp_path: Path) -> None:
    """By the law of texts, with a tokenizer like that of Llama 2; the spec's own processor holds the laws."""
    tokenizer = spaced("always")
    tokenizer.save_pretrained(tmp_path)
    folder = write_checkpoint(tmp_path, (), (), vocab_size=len(tokenizer), architectures=["MmkitMadeUp"])
    own = testing.of_spec(GRAPHS, folder)
    for law in ("text", "ranges", "idempotence", "refusal"):
        testing.check_law(law, own, examples=scaled(40))
    changed = testing.of_spec(GRAPHS, folder, classes=GRAPHS.classes._replace(processor=Again))
    with pytest.raises(testing.Violation, match="text: outside its items the prompt has"):
        testing.check_law("text", changed, examples=200)
