"""Specs with texts in layouts, lists, absent parts, sentinels and items of ids: all paths make the same of a request.

The paths are `expand`, `unexpand` and `outline` of the plan, vLLM's processor without caches and with two kinds of
them, the processor for transformers and its chat, `POST /v1/mm/generate`, and a chat by HTTP through vLLM's renderer.
An account in plain Python says what is expected of each. What one refuses, the others do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from examples.server import Server
from mmkit import InputError
from mmkit.serve.client import Client
from mmkit.testing.differences import find_difference
from mmkit.testing.vllm_path import Outcome
from tests import hf_law
from tests.profiles import scaled
from tests.wild.common import collect_items
from tests.wild.compare import compare_chat, draw_chat, render
from tests.wild.serve import ANSWER_TOKENS, answer_by_account, answer_by_engine, encode_chat, write_checkpoint

from .request_paths import RequestPaths, open_paths
from .words import DrawnRequest, DrawnSpec, Expected, requests, specs, wrong_requests
from .words_model import CasesForCausalLM, open_cases

pytestmark = pytest.mark.timeout(3000)

REQUESTS_OF_SPEC = 10
WRONG_REQUESTS_OF_SPEC = 2


def test_all_paths_make_the_same_of_a_request() -> None:
    """500 requests of 50 specs; HYPOTHESIS_PROFILE=thorough draws ten times as many."""
    counts = Counter[str]()

    @settings(
        max_examples=scaled(50),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        # shrinking a request that takes all paths may take an hour
        phases=[Phase.generate],
    )
    @given(specs(), st.data())
    def check_spec(drawn: DrawnSpec, data: Any) -> None:
        counts["specs"] += 1
        with open_paths(drawn) as paths:
            for _ in range(REQUESTS_OF_SPEC):
                check_request(paths, data.draw(requests(drawn)), counts)
            for _ in range(WRONG_REQUESTS_OF_SPEC):
                check_refusal(paths, data.draw(wrong_requests(drawn)), counts)

    check_spec()
    print(dict(counts))
    assert counts["requests"] >= REQUESTS_OF_SPEC * scaled(50)
    assert counts["chats"] > counts["requests"] / 2
    assert counts["with items of ids"] > counts["requests"] / 10
    assert counts["refused"] > WRONG_REQUESTS_OF_SPEC * scaled(50) / 2


# -- one request -------------------------------------------------------------------------------------------------------


def check_request(paths: RequestPaths, request: DrawnRequest, counts: Counter[str]) -> None:
    """Send a request on every path.

    Raises:
        AssertionError: one makes something else of it than the account.
    """
    prompt = request.make_prompt()
    expected = request.expand(prompt)
    check_plan(paths, request, prompt, expected)
    check_vllm(paths, request, prompt, expected)
    assert hf_law.compare(paths.transformers, paths.processor, prompt, request.data)
    served = paths.generate(prompt, request.data)
    check_outcome(served, expected)
    counts["requests"] += 1
    counts["items"] += sum(map(len, request.data.values()))
    ids_only = [name for name in request.data if not request.spec.kinds[name].has_rows]
    counts["with items of ids"] += bool(ids_only)
    if request.text is not None:
        # what begins every text is part of a prompt, and of no message
        of_text = request.expand(request.make_prompt(begins=True))
        assert paths.plan.expand(request.text, request.data) == of_text.ids
        check_outcome(paths.run(request.text, request.data), of_text)
        check_outcome(paths.generate(request.text, request.data), of_text)
        check_outcome(paths.chat(request.make_messages()), expected)
        assert paths.train_on_chat(request.make_messages()) == expected.ids
        counts["chats"] += 1


def check_plan(paths: RequestPaths, request: DrawnRequest, prompt: list[int], expected: Expected) -> None:
    """Expand a prompt, take it back, and plan it by the facts of its items."""
    plan, data = paths.plan, request.data
    assert plan.expand(prompt, data) == expected.ids
    assert plan.expand(expected.ids, data) == expected.ids
    unexpanded = plan.unexpand(expected.ids, data)
    assert plan.expand(unexpanded, data) == expected.ids
    if all(kind.has_rows for kind in request.spec.kinds.values()):
        assert unexpanded == prompt
    with_rows = {name: values for name, values in data.items() if request.spec.kinds[name].has_rows}
    assert plan.expand(expected.ids, with_rows) == expected.ids
    if not any(request.spec.kinds[name].has_codes for name in data):
        outline = plan.outline(prompt, data)
        assert outline.prompt_token_ids == expected.ids
        rows = {name: values for name, values in outline.rows.items() if name in with_rows}
        assert rows == {name: [sum(place.mask) for place in places] for name, places in expected.ranges.items()}


def check_vllm(paths: RequestPaths, request: DrawnRequest, prompt: list[int], expected: Expected) -> None:
    """Run a request without caches, and twice with each cache: what comes out of it was put there before."""
    plain = paths.run(prompt, request.data)
    check_outcome(plain, expected)
    for caches in paths.caches:
        for _ in range(2):
            cached = paths.run(prompt, request.data, caches)
            assert not find_difference(plain, cached)


def check_outcome(outcome: Any, expected: Expected) -> None:
    """Compare the outcome of vLLM's path with the account."""
    assert isinstance(outcome, Outcome), outcome
    assert outcome.ids == expected.ids
    assert outcome.ranges == expected.ranges
    assert outcome.fields.keys() == expected.numbers.keys()
    for name, numbers in expected.numbers.items():
        assert [fields[f"{name}_numbers"].tolist() for fields in outcome.fields[name]] == numbers


def check_refusal(paths: RequestPaths, request: DrawnRequest, counts: Counter[str]) -> None:
    """Send a request with a malformed item on every path.

    Raises:
        AssertionError: a way takes it, or the paths of this process give other reasons.
    """
    prompt = request.make_prompt()
    calls: list[Callable[[], Any]] = [
        lambda: paths.plan.expand(prompt, request.data),
        lambda: paths.plan.unexpand(prompt, request.data),
        lambda: paths.plan.outline(prompt, request.data),
        lambda: paths.run(prompt, request.data),
        lambda: paths.run(prompt, request.data, paths.caches[0]),
        lambda: paths.run(prompt, request.data, paths.caches[1]),
        lambda: paths.transformers(input_ids=prompt, **request.data),
        lambda: paths.train_on_chat(request.make_messages()),
    ]
    sentences = set()
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        sentences.add(str(caught.value))
    assert len(sentences) == 1, sentences
    for answer in (paths.generate(prompt, request.data), paths.chat(request.make_messages())):
        assert isinstance(answer, str), "a refusal"
    counts["refused"] += 1


# -- engines -----------------------------------------------------------------------------------------------------------

NUM_CHATS = 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    """The model in transformers, by the account of its prompts."""
    return write_checkpoint(open_cases(), CasesForCausalLM, checkpoint)


def test_an_engine_answers_about_cases(checkpoint: Path, model: Any, engines: ExitStack) -> None:
    """30 chats, as texts with items and as messages, beside the model in transformers."""
    opened = open_cases()
    for number in range(400):
        compare_chat(opened, draw_chat(opened, number))
    chats = [draw_chat(opened, number) for number in range(NUM_CHATS)]
    expected = [answer_by_account(opened, model, messages) for messages in chats]
    offline, chat = answer_by_engine(opened, checkpoint, chats)
    assert offline == expected
    assert chat == expected
    assert len(set(map(tuple, expected))) > NUM_CHATS / 2


def test_a_server_answers_about_cases(checkpoint: Path, model: Any, tmp_path: Path) -> None:
    """Twelve chats over mmkit's route, in streams of several answers, in sessions, and over vLLM's chat."""
    opened = open_cases()
    options = ("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--served-model-name", "cases")
    environment = {"MMKIT_MODULES": "tests.night.words_model"}
    with (
        Server(checkpoint, *options, environment=environment, log=tmp_path / "log") as server,
        Client(server.url) as client,
    ):
        for number in range(12):
            messages = draw_chat(opened, number)
            expected = opened.model.expand(opened.tokenizer, opened.config, messages).ids
            answer = answer_by_account(opened, model, messages)
            prompt = opened.tokenizer.encode(render(opened, messages))
            items = collect_items(messages)
            check_routes(client, prompt, items, expected, answer)
            more = draw_chat(opened, number + 100)
            check_session(client, prompt, items, expected, answer, collect_items(more))
            check_chat(server, messages, expected, answer)


SAMPLING: dict[str, Any] = {
    "temperature": 0.0,
    "max_tokens": ANSWER_TOKENS,
    "min_tokens": ANSWER_TOKENS,
}


def check_routes(client: Client, prompt: list[int], items: Any, expected: list[int], answer: list[int]) -> None:
    """Ask once, and for a stream of two answers, which are drawn from the most likely id alone."""
    whole = client.generate(prompt, items, return_token_ids=True, **SAMPLING)
    assert whole.prompt_token_ids == expected
    assert whole.choices[0].token_ids == answer
    ids: dict[int, list[int]] = {0: [], 1: []}
    # vLLM takes no second answer at temperature 0
    for event in client.stream(prompt, items, n=2, top_k=1, **SAMPLING | {"temperature": 1.0}):
        for choice in event.choices:
            ids[choice.index] += choice.token_ids
    assert ids == {0: answer, 1: answer}


def check_session(
    client: Client, prompt: list[int], items: Any, expected: list[int], answer: list[int], more: Any
) -> None:
    """Ask in a session, and go on with more items; one request with everything has the same answer."""
    plan = open_cases().plan
    # a server spells items in the order of the spec, whatever the order of the message
    targets = plan.spell({name: more[name] for name in plan.modalities if name in more})
    with client.session(prompt, items, **SAMPLING) as session:
        assert session.first.token_ids == answer
        second = session.next(more)
    together = {name: items.get(name, []) + more.get(name, []) for name in {*items, *more}}
    whole = client.generate(expected + answer + targets, together, **SAMPLING)
    assert second.token_ids == whole.choices[0].token_ids


def check_chat(server: Server, messages: Any, expected: list[int], answer: list[int]) -> None:
    """Ask over vLLM's chat."""
    body = {"model": "cases", "messages": encode_chat(messages), "return_token_ids": True, **SAMPLING}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    assert response.json()["prompt_token_ids"] == expected
    assert response.json()["choices"][0]["token_ids"] == answer
