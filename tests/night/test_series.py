"""The time-series model: trained anew, and served to the client of OpenAI."""

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from examples.series import CHECKPOINT
from examples.series.reference import WavesForCausalLM
from examples.series.spec import WAVES
from examples.series.train import train
from examples.series.waves import ANSWER_WORDS, PROMPT
from examples.server import Server
from mmkit.wire.items import encode
from tests.engine.test_series import HELD_OUT, SERIES, TEMPLATE, compute_share, make_turns, tokenizer

__all__ = ["tokenizer"]

ENCODED = encode({"series": SERIES[:5]})["series"]
GREEDY: Any = {"temperature": 0.0, "max_tokens": ANSWER_WORDS}


def test_a_model_that_is_trained_anew_is_as_right_as_the_checkpoint(tokenizer: Any) -> None:
    """Its weights are equal to those of the checkpoint only on the machine that trained both."""
    torch.set_num_threads(1)
    model, _ = train(300, seed=0)
    processor = WAVES.hf_processor(model.config, tokenizer)
    ids = [model.answer(processor, PROMPT, series, ANSWER_WORDS) for series in SERIES]
    assert compute_share(ids, tokenizer, HELD_OUT) >= 0.95


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("series")
    (folder / "template").write_text(TEMPLATE)
    options = "--dtype float32 --max-model-len 128 --served-model-name waves --enforce-eager --chat-template"
    with Server(CHECKPOINT, *options.split(), str(folder / "template"), log=folder / "log") as server:
        yield server


@pytest.fixture(scope="module")
def chat(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).chat.completions


@pytest.fixture(scope="module")
def answers(tokenizer: Any) -> list[list[int]]:
    """The ids of the reference for each turn."""
    model = WavesForCausalLM.from_pretrained(CHECKPOINT).eval()
    processor = WAVES.hf_processor(model.config, tokenizer)
    ids = []
    for turn in make_turns(SERIES, tokenizer):
        text = tokenizer.decode(turn.request["prompt_token_ids"])
        series = turn.request["multi_modal_data"]["series"]
        ids.append(model.answer(processor, text, series, ANSWER_WORDS))
    return ids


def ask(chat: Any, messages: Any, **options: Any) -> Any:
    extra = {"return_token_ids": True, "cache_salt": "s"}
    return chat.create(model="waves", messages=messages, extra_body=extra, **GREEDY, **options)


def make_messages(part: Any) -> list[Any]:
    """Return the message of a user with a part of content and a text."""
    return [{"role": "user", "content": [part, {"type": "text", "text": "is a"}]}]


def join_ids(events: list[Any]) -> list[int]:
    """Return the ids of the answer that a stream brought."""
    ids: list[int] = []
    for event in events:
        for choice in event.choices:
            ids += choice.to_dict().get("token_ids") or []
    return ids


@pytest.mark.parametrize("parts", [ENCODED, [series.tolist() for series in SERIES[:5]]], ids=["encoded", "lists"])
def test_turns_of_a_conversation_give_the_ids_of_the_reference(
    chat: Any, tokenizer: Any, answers: list[list[int]], parts: list[Any]
) -> None:
    for turn, ids in zip(make_turns(parts, tokenizer), answers, strict=True):
        whole = ask(chat, turn.messages)
        events = list(ask(chat, turn.messages, stream=True, stream_options={"include_usage": True}))

        assert whole.choices[0].token_ids == ids
        assert join_ids(events) == ids
        assert events[-1].usage == whole.usage


def test_a_uuid_names_a_series_that_was_sent_before(chat: Any) -> None:
    first = ask(chat, make_messages({"type": "series", "series": ENCODED[0], "uuid": "first"}))
    again = ask(chat, make_messages({"type": "series", "series": None, "uuid": "first"}))
    assert first.choices[0].token_ids == again.choices[0].token_ids


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        pytest.param(
            {"type": "series", "series": [[1.0]] * 65},
            "messages[0].content[0].series: expected a (1..64, 1) float32 tensor",
            id="a series that is too long",
        ),
        pytest.param(
            {"type": "series", "series": {"dat": 1}},
            "messages[0].content[0].series.dat: expected fields among ['data', 'dtype', 'shape'",
            id="a misspelt field",
        ),
        pytest.param(
            {"type": "series", "series": None},
            "messages[0].content[0].series: expected an item, or a uuid that names one, got null.",
            id="null without a uuid",
        ),
        pytest.param(
            {"type": "series"},
            'messages[0].content[0]: expected a field "series" with the item, got none.',
            id="no item",
        ),
        pytest.param(
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            "expected modalities among ['series'], got 'image'",
            id="another modality",
        ),
    ],
)
def test_a_part_of_content_is_refused(chat: Any, part: Any, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(sentence)):
        ask(chat, make_messages(part))


def test_items_are_refused_at_the_completions_of_vllm(server: Server) -> None:
    completions = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none").completions
    with pytest.raises(openai.BadRequestError, match="items: expected no items at /v1/completions, got some"):
        completions.create(model="waves", prompt=PROMPT, extra_body={"items": {"series": ENCODED[:1]}})
