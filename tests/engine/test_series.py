"""The time-series model: trained here, run in the engine, compared with its reference."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoTokenizer

from examples.series import register
from examples.series.grpo import learn, update
from examples.series.offline import answer, engine
from examples.series.picture import draw
from examples.series.spec import WAVES
from examples.series.train import train
from examples.series.waves import ANSWER_WORDS, FIRST_TEST_SEED, FIRST_TRAINING_SEED, PROMPT, SHAPES, Wave, make_wave
from mmkit import InputError
from mmkit.serve import Client
from mmkit.serve.process import Server
from mmkit.serve.wire import encode
from mmkit.training import Collator
from tests.engine.processes import engines_in_this_process

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "series.svg"
TOOLS = [{"type": "function", "function": {"name": "plot", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<series>' if part.type == 'series' else part.text }} {% endfor %}{% endfor %}"
)
HELD_OUT = [make_wave(seed) for seed in range(FIRST_TEST_SEED, FIRST_TEST_SEED + 100)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A trained checkpoint, the reference and its tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    torch.set_num_threads(1)
    model, tokenizer = train(300, seed=0)
    model.save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder, model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def llm(trained: tuple[Path, Any, Any]) -> Iterator[Any]:
    register()
    with engines_in_this_process() as engines:
        yield engines.enter_context(engine(trained[0], seed=0))


def share(ids: list[list[int]], tokenizer: Any, waves: list[Wave]) -> float:
    return sum(tokenizer.decode(one) == wave.answer for one, wave in zip(ids, waves, strict=True)) / len(waves)


def test_answers_follow_the_series(llm: Any, trained: tuple[Path, Any, Any]) -> None:
    assert FIRST_TEST_SEED + len(HELD_OUT) <= FIRST_TRAINING_SEED
    _, _, tokenizer = trained
    ids = answer(llm, [wave.series for wave in HELD_OUT])
    assert share(ids, tokenizer, HELD_OUT) >= 0.95
    assert share(ids, tokenizer, HELD_OUT[1:] + HELD_OUT[:1]) <= 0.1  # with another series in its place
    shown = [next(i for i, wave in enumerate(HELD_OUT) if wave.answer.startswith(shape)) for shape in SHAPES]
    picture = draw([HELD_OUT[i].series for i in shown], [tokenizer.decode(ids[i]) for i in shown])
    assert picture == PICTURE.read_text()


def test_same_ids_as_the_reference(llm: Any, trained: tuple[Path, Any, Any]) -> None:
    _, model, tokenizer = trained
    processor = WAVES.hf_processor(model.config, tokenizer)
    waves = HELD_OUT[:40]
    expected = [model.answer(processor, PROMPT, wave.series, ANSWER_WORDS) for wave in waves]
    assert answer(llm, [wave.series for wave in waves]) == expected


def test_two_series_of_one_request(llm: Any, trained: tuple[Path, Any, Any]) -> None:
    from vllm import SamplingParams

    _, _, tokenizer = trained
    first, second = HELD_OUT[:2]
    prompt = f"{PROMPT} {first.answer} . {PROMPT}"
    request = {"prompt": prompt, "multi_modal_data": {"series": [first.series, second.series]}}
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_WORDS)
    (result,) = llm.generate([request], sampling, use_tqdm=False)
    assert tokenizer.decode(result.outputs[0].token_ids) == second.answer


def test_a_malformed_series_is_refused(llm: Any) -> None:
    with pytest.raises(InputError, match=r"waves\.series\[0\]: expected a \(1\.\.64, 1\) float32 tensor"):
        answer(llm, [torch.zeros(65, 1)])
    assert len(answer(llm, [torch.zeros(64, 1)])) == 1


# -- chat --------------------------------------------------------------------------------------------------------------


def turns(parts: list[Any], tokenizer: Any) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Three turns of a conversation, each with the request for `LLM.generate` that it is."""
    messages: list[dict[str, Any]] = []
    series: list[Any] = []
    words: list[str] = []
    for first, second in ((0, 1), (2, None), (3, 4)):
        numbers = [number for number in (first, second) if number is not None]
        own = [HELD_OUT[number] for number in numbers]
        content = [{"type": "series", "series": parts[number]} for number in numbers]
        messages.append({"role": "user", "content": [*content, {"type": "text", "text": "is a"}]})
        series += [wave.series for wave in own]
        words += ["<series>"] * len(own) + ["is a"]
        prompt = tokenizer.encode(" ".join(words))
        yield messages, {"prompt_token_ids": prompt, "multi_modal_data": {"series": series}}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": own[-1].answer}]})
        words.append(own[-1].answer)


def generated(llm: Any, request: dict[str, Any]) -> tuple[list[int], list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_WORDS)
    (result,) = llm.generate([request], sampling, use_tqdm=False)
    return result.prompt_token_ids, list(result.outputs[0].token_ids)


def test_series_in_a_chat(llm: Any, trained: tuple[Path, Any, Any]) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_WORDS)
    processor = WAVES.hf_processor(llm.llm_engine.model_config.hf_config, trained[2])
    for messages, request in turns([wave.series for wave in HELD_OUT], trained[2]):
        (result,) = llm.chat([messages], sampling, use_tqdm=False)
        inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True)
        assert inputs["input_ids"].tolist() == [result.prompt_token_ids]
        assert (result.prompt_token_ids, list(result.outputs[0].token_ids)) == generated(llm, request)
    with pytest.raises(InputError, match="messages: expected parts of a type among text, series, got 'waves'"):
        llm.chat([[{"role": "user", "content": [{"type": "waves", "waves": [[1.0]]}]}]], sampling, use_tqdm=False)
    # a template of texts: placeholders first, as those of images
    (last,) = llm.chat([messages[-2:-1]], sampling, use_tqdm=False, chat_template_content_format="string",
        chat_template="{{ messages[0].content }}")  # fmt: skip
    prompt = {**request, "prompt_token_ids": trained[2].encode("<series> <series> is a")}
    prompt["multi_modal_data"] = {"series": request["multi_modal_data"]["series"][-2:]}
    assert last.prompt_token_ids == generated(llm, prompt)[0]


def series_in_messages_to_our_routes(url: str, answers: list[tuple[int, list[int]]], tokenizer: Any) -> None:
    """The same three turns, each as a request with all messages, and in a session with the new ones."""
    greedy: Any = {"temperature": 0.0, "max_tokens": ANSWER_WORDS}
    with Client(url) as client:
        users = []
        said = turns([wave.series for wave in HELD_OUT], tokenizer)
        for (length, answered), (messages, _) in zip(answers, said, strict=True):
            whole = client.generate(messages=messages, **greedy)
            assert (whole.usage.prompt_tokens, whole.choices[0].token_ids) == (length, answered)
            users.append(messages[-1:])
        with client.session(messages=users[0], **greedy) as session:
            chunks = [session.first, *(session.next(messages=new) for new in users[1:])]
        assert [chunk.token_ids for chunk in chunks] == [answered for _, answered in answers]


def test_series_from_the_openai_client(llm: Any, trained: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder, _, tokenizer = trained
    options = ("--dtype", "float32", "--max-model-len", "128", "--served-model-name", "waves", "--enforce-eager",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes")  # fmt: skip
    encoded = encode({"series": [wave.series for wave in HELD_OUT[:5]]})["series"]
    as_lists = [wave.series.tolist() for wave in HELD_OUT[:5]]
    with Server(folder, *options, log=tmp_path / "log") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        chat: Any = client.chat.completions
        asked: dict[str, Any] = {"model": "waves", "temperature": 0, "max_tokens": ANSWER_WORDS}
        asked["extra_body"] = {"return_token_ids": True}
        answers = []
        for parts in (encoded, as_lists):
            for messages, request in turns(parts, tokenizer):
                ids, answered = generated(llm, request)
                answers.append((len(ids), answered))
                whole = chat.create(messages=messages, **asked)
                assert (whole.prompt_token_ids, whole.choices[0].token_ids) == (ids, answered)
                events = [*chat.create(messages=messages, stream=True, stream_options={"include_usage": True}, **asked)]
                assert events[-1].usage == whole.usage
                new = [choice.to_dict().get("token_ids") or [] for event in events for choice in event.choices]
                assert [token for ids in new for token in ids] == answered
        (_, answered), alone = answers[0], next(turns(encoded, tokenizer))[0]
        likeliest = {**asked, "temperature": 1.0, "extra_body": {"return_token_ids": True, "top_k": 1}}
        several = chat.create(messages=alone, n=2, logprobs=True, top_logprobs=2, tools=TOOLS, **likeliest)
        assert [choice.token_ids for choice in several.choices] == [answered] * 2
        tokens = several.choices[0].logprobs.content
        assert [token.top_logprobs[0].logprob for token in tokens] == [token.logprob for token in tokens]
        assert [len(token.top_logprobs) for token in tokens] == [2] * len(answered)
        assert several.choices[0].message.tool_calls is None
        number = {"type": "json_schema", "json_schema": {"name": "number", "schema": {"type": "integer"}}}
        digits = chat.create(messages=alone, response_format=number, **asked).choices[0].message.content
        assert digits.replace(" ", "").isdecimal()
        series_in_messages_to_our_routes(server.url, answers[:3], tokenizer)
        named = {"type": "series", "series": encoded[0], "uuid": "first"}
        salted = {**asked, "extra_body": {"return_token_ids": True, "cache_salt": "s"}}
        one, again = (
            chat.create(messages=[{"role": "user", "content": [sent, {"type": "text", "text": "is a"}]}], **salted)
            for sent in (named, {**named, "series": None})
        )
        assert one.choices[0].token_ids == again.choices[0].token_ids
        for bad, sentence in (
            ([[1.0]] * 65, "series[0]: expected a (1..64, 1) float32 tensor"),
            ({"data": "AAAA", "dtype": "float32", "shape": [2, 1]}, "items.series[0].data: expected 8 bytes"),
            ({"dat": 1}, "items.series[0]: expected nested lists of numbers"),
            (None, "multi_modal_data['series'][0] is empty but multi_modal_uuids['series'][0] is missing."),
        ):
            with pytest.raises(openai.BadRequestError, match=re.escape(sentence)):
                chat.create(messages=[{"role": "user", "content": [{"type": "series", "series": bad}]}], **asked)
        with pytest.raises(openai.BadRequestError, match='the item of a part "series" as its "series", got none'):
            chat.create(messages=[{"role": "user", "content": [{"type": "series"}]}], **asked)
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        with pytest.raises(openai.BadRequestError, match=r"expected modalities among \['series'\], got 'image'"):
            chat.create(messages=[{"role": "user", "content": [picture]}], **asked)
        with pytest.raises(openai.BadRequestError, match="items: expected no items at /v1/completions, got some"):
            client.completions.create(model="waves", prompt=PROMPT, extra_body={"items": {"series": encoded[:1]}})


def test_rollouts_are_what_is_trained_on(llm: Any, trained: tuple[Path, Any, Any]) -> None:
    """Five updates: the prompts of both sides are one, and so are the log probabilities, to rounding."""
    _, model, tokenizer = trained
    learner = copy.deepcopy(model)
    steps = list(learn(llm, learner, Collator(WAVES.hf_processor(model.config, tokenizer)), 5))
    assert len(steps) == 5
    assert max(step.apart for step in steps) < 1e-4
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), learner.parameters(), strict=True))
    update(llm, model)  # for the tests after this one
