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
from mmkit.serve.wire import encode
from tests.engine.test_series import HELD_OUT, SERIES, TEMPLATE, share, tokenizer, turns

__all__ = ["tokenizer"]

ENCODED = encode({"series": SERIES[:5]})["series"]
GREEDY: Any = {"temperature": 0.0, "max_tokens": ANSWER_WORDS}
SERIES_PART, IMAGE_PART = {"type": "series"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
REFUSED = [
    (SERIES_PART | {"series": [[1.0]] * 65}, "messages[0].content[0].series: expected a (1..64, 1) float32 tensor"),
    (SERIES_PART | {"series": {"dat": 1}}, "messages[0].content[0].series.dat: expected one of data, dtype, shape"),
    (
        SERIES_PART | {"series": None},
        "messages[0].content[0].series: expected an item, or a uuid that names one, got null.",
    ),
    (SERIES_PART, 'messages[0].content[0]: expected a field "series" with the item, got none.'),
    (IMAGE_PART, "expected modalities among ['series'], got 'image'"),
]


def test_training_makes_the_checkpoint_anew(tokenizer: Any) -> None:
    """As right as the committed one; equal weights come of one machine alone."""
    torch.set_num_threads(1)
    model, _ = train(300, seed=0)
    processor = WAVES.hf_processor(model.config, tokenizer)
    ids = [model.answer(processor, PROMPT, one, ANSWER_WORDS) for one in SERIES]
    assert share(ids, tokenizer, HELD_OUT) >= 0.95


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
    """The reference's ids of each turn."""
    model = WavesForCausalLM.from_pretrained(CHECKPOINT).eval()
    processor = WAVES.hf_processor(model.config, tokenizer)
    asked = [(tokenizer.decode(one["prompt_token_ids"]), one["multi_modal_data"]["series"])
        for _, one in turns(SERIES, tokenizer)]  # fmt: skip
    return [model.answer(processor, text, series, ANSWER_WORDS) for text, series in asked]


def ask(chat: Any, messages: Any, **options: Any) -> Any:
    extra = {"return_token_ids": True, "cache_salt": "s"}
    return chat.create(model="waves", messages=messages, extra_body=extra, **GREEDY, **options)


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "is a"}]}]


@pytest.mark.parametrize("parts", [ENCODED, [series.tolist() for series in SERIES[:5]]], ids=["encoded", "lists"])
def test_turns_of_a_conversation(chat: Any, tokenizer: Any, answers: list[list[int]], parts: list[Any]) -> None:
    for (messages, _), ids in zip(turns(parts, tokenizer), answers, strict=True):
        whole = ask(chat, messages)
        assert whole.choices[0].token_ids == ids
        events = [*ask(chat, messages, stream=True, stream_options={"include_usage": True})]
        assert events[-1].usage == whole.usage
        new = [choice.to_dict().get("token_ids") or [] for event in events for choice in event.choices]
        assert [token for ids in new for token in ids] == ids


def test_a_series_is_known_by_its_name(chat: Any) -> None:
    named = {"type": "series", "series": ENCODED[0], "uuid": "first"}
    one, again = (ask(chat, user(part)).choices[0].token_ids for part in (named, {**named, "series": None}))
    assert one == again


def test_what_is_refused(server: Server, chat: Any) -> None:
    for part, sentence in REFUSED:
        with pytest.raises(openai.BadRequestError, match=re.escape(sentence)):
            ask(chat, user(part))
    completions = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none").completions
    with pytest.raises(openai.BadRequestError, match="items: expected no items at /v1/completions, got some"):
        completions.create(model="waves", prompt=PROMPT, extra_body={"items": {"series": ENCODED[:1]}})
