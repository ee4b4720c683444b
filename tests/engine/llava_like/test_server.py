"""Texts, images and precomputed embeddings over HTTP: the answers of the engine, which are those of transformers."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from examples.llava_like.cases import Case
from examples.llava_like.offline import answer
from examples.llava_like.reference import Reference
from examples.llava_like.spec import LLAVA_LIKE
from examples.server import Server
from mmkit.serve import Client, RequestError
from mmkit.testing import of_spec
from tests.engine.llava_like.bodies import (
    BOMB,
    PICTURE,
    PICTURES,
    PLACEHOLDER,
    QUESTION,
    SAMPLING,
    TIMEOUT,
    encode_pictures,
    generate_ids,
    get_data_url,
    make_array,
    make_item,
    post,
    save_tensor,
)
from tests.engine.terra_server import clients
from tests.profiles import scaled

pytestmark = pytest.mark.timeout(600)


# -- requests of the client --------------------------------------------------------------------------------------------


def test_texts_and_ids_with_images_have_the_answers_of_the_engine(
    client: Client, cases: list[Case], answers: list[list[int]]
) -> None:
    for case, ids in zip(cases[:12], answers, strict=False):
        images = {"image": case.images} if case.images else None
        (choice,) = client.generate(case.prompt, images, **SAMPLING).choices
        assert choice.token_ids == ids, case.kind


def test_a_dialogue_is_the_prompt_so_far(client: Client, tokenizer: Any, llava: Any) -> None:
    """A text after the first is tokenized by itself, without another <s>."""
    with client.session(QUESTION, PICTURE, **SAMPLING) as session:
        first = session.first.token_ids
        second = session.next({"image": PICTURES[1:2]}, QUESTION).token_ids
    assert [first] == answer(llava, [Case(QUESTION, tuple(PICTURES[:1])).request()])
    prompt = tokenizer.encode(QUESTION) + first + tokenizer.encode(QUESTION, add_special_tokens=False)
    assert [second] == answer(llava, [Case(prompt, tuple(PICTURES[:2])).request()])


def test_embeddings_stand_for_their_image(client: Client, reference: Reference) -> None:
    (rows,) = reference.embed(PICTURES[:1])
    assert generate_ids(client, {"image": {"image_embeds": rows[None]}}) == generate_ids(client)


def test_embeddings_of_another_number_of_rows_are_refused(client: Client, reference: Reference) -> None:
    (rows,) = reference.embed(PICTURES[:1])
    with pytest.raises(RequestError, match="llava_like") as caught:
        generate_ids(client, {"image": {"image_embeds": rows[None, :-1]}})
    assert caught.value.code == 400
    assert caught.value.param == "items.image[0]"


def test_an_answer_has_the_whole_prompt_with_its_ranges(
    client: Client, cases: list[Case], tokenizer: Any, checkpoint: Path
) -> None:
    """The ids are what the plan expands the request to."""
    plan = of_spec(LLAVA_LIKE, checkpoint).processor.plan
    for case in cases[: scaled(24)]:
        images: dict[str, Any] = {"image": case.images} if case.images else {}
        prompt_ids = tokenizer.encode(case.prompt) if isinstance(case.prompt, str) else case.prompt
        generation = client.generate(case.prompt, images, max_tokens=1, return_token_ids=True)
        ids = generation.prompt_token_ids
        assert ids is not None
        assert plan.unexpand(ids, images) == prompt_ids
        ranges = (generation.mm_placeholders or {}).get("image", [])
        assert len(ranges) == len(case.images)
        num_placeholders = 0
        for place in ranges:
            assert set(ids[place.offset : place.offset + place.length]) == {PLACEHOLDER}
            num_placeholders += place.length
        assert num_placeholders == ids.count(PLACEHOLDER)


def test_the_first_event_of_a_stream_has_the_whole_prompt(client: Client) -> None:
    options = {"max_tokens": 2, "ignore_eos": True, "return_token_ids": True}
    first, *others = client.stream(QUESTION, PICTURE, **options)
    assert first.prompt_token_ids is not None
    for event in others:
        assert event.prompt_token_ids is None


def test_an_answer_without_ids_has_no_ranges(client: Client) -> None:
    assert client.generate(QUESTION, PICTURE, max_tokens=1).mm_placeholders is None


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 1e38])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_embeddings_of_a_prompt_reach_nobody_else(value: float, path: str, server: Server, client: Client) -> None:
    """What the KV cache must not hold is refused, and the next answer is what it was."""
    before = generate_ids(client)
    rows = save_tensor(torch.full((40, 64), value))
    body: dict[str, Any] = {"model": "llava", "prompt_embeds": rows}
    if path == "/v1/chat/completions":
        content = [{"type": "text", "text": "hi"}, {"type": "prompt_embeds", "data": rows}]
        body = {"model": "llava", "messages": [{"role": "user", "content": content}]}
    refusal = post(server, path, body)
    assert refusal.status_code == 400, refusal.text
    assert "llava_like.prompt_embeds: expected " in refusal.text
    assert generate_ids(client) == before


# -- constraints -------------------------------------------------------------------------------------------------------

TO_THE_END = {"max_tokens": 64, "ignore_eos": False}
CONSTRAINT = "structured_outputs: expected"


def test_a_text_follows_its_constraint(client: Client) -> None:
    options = SAMPLING | TO_THE_END | {"structured_outputs": {"choice": ["a cat", "a dog"]}}
    (choice,) = client.generate(QUESTION, PICTURE, **options).choices
    assert choice.finish_reason == "stop"
    assert choice.text in ("a cat", "a dog")


@pytest.mark.parametrize(
    ("constraint", "sentence"),
    [
        ({}, f"{CONSTRAINT} parameters that vLLM takes, got You must use one kind"),
        ({"x": "a"}, "structured_outputs.x: expected fields among ['json', 'regex', "),
        ({"regex": "[a"}, "Grammar error"),
        ({"regex": r"\p{Greek}+"}, f"{CONSTRAINT} one that the model's tokens can follow"),
    ],
    ids=["none, by vLLM", "another field, by the route", "malformed, before the engine", "impossible, in the engine"],
)
def test_a_constraint_that_is_refused_leaves_other_answers_as_they_are(
    client: Client, constraint: dict[str, Any], sentence: str
) -> None:
    before = generate_ids(client)
    with pytest.raises(RequestError) as caught:
        generate_ids(client, **TO_THE_END, structured_outputs=constraint)
    assert caught.value.code == 400
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert generate_ids(client) == before


# -- what is counted ---------------------------------------------------------------------------------------------------


def count_refusals(server: Server) -> Counter[tuple[str, str]]:
    """Return the number of refusals by route and reason."""
    pattern = re.compile(r'mmkit:refused_requests_total{.*,reason="(.*)",route="(.*)"} (.*)')
    metrics = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT).text
    counts: Counter[tuple[str, str]] = Counter()
    for match in pattern.finditer(metrics):
        reason, route, count = match.groups()
        counts[route, reason] += int(float(count))
    return counts


def assert_counted(server: Server, path: str, body: dict[str, Any], route: str, reason: str) -> None:
    """Check that a refusal is counted once, and nothing else."""
    before = count_refusals(server)
    refusal = post(server, path, body)
    assert 400 <= refusal.status_code < 500, refusal.text
    assert count_refusals(server) - before == {(route, reason): 1}


def make_chat(content: list[Any], **options: Any) -> dict[str, Any]:
    """Return a body of a chat, in whose message a text follows."""
    message = {"role": "user", "content": [*content, {"type": "text", "text": "what is it?"}]}
    return {"model": "llava", "messages": [message]} | SAMPLING | options


def nest(depth: int) -> Any:
    """Return a number in so many lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


NAN_PIXELS = np.full(3, np.nan, np.float32).tobytes()

MALFORMED_ITEMS: list[Any] = [
    make_array(8, 8, 2),
    make_array(8),
    make_array(0, 8, 3),
    [[[1, 2, 3]], [[1, 2]]],
    [[[1e39, 0, 0]]],
    [[[70000, 0, 0]]],
    make_array(1, 1, 3, dtype="float32", data=NAN_PIXELS),
    [[["a", "b", "c"]]],
    {"data": "%%%", "dtype": "uint8", "shape": [8, 8, 3]},
    make_array(8, 8, 3, data=b"short"),
    make_array(8, 8, 3, dtype="float99"),
    {"x": 1},
    {"image_url": 1},
    nest(40),
    {"image_url": {"url": "data:image/png;base64,AAAA"}},
    5,
]


@pytest.mark.parametrize("value", MALFORMED_ITEMS)
def test_a_malformed_item_of_a_chat_is_counted(server: Server, value: Any) -> None:
    """Also where the answer would be a stream, or no text."""
    content = [make_item(value)]
    assert_counted(server, "/v1/chat/completions", make_chat(content), "vllm", "item")
    assert_counted(server, "/v1/chat/completions", make_chat(content, stream=True), "vllm", "item")
    assert_counted(server, "/tokenize", make_chat(content), "vllm", "item")


def test_a_picture_of_too_many_pixels_is_counted_as_a_limit(server: Server) -> None:
    content = [make_item({"image_url": {"url": get_data_url(BOMB)}})]
    assert_counted(server, "/v1/chat/completions", make_chat(content), "vllm", "limit")
    assert_counted(server, "/tokenize", make_chat(content), "vllm", "limit")


GOOD_ITEM = make_item(make_array(8, 8, 3))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "cloud", "cloud": [1]}], "item"),
        ([{"type": "image"}], "item"),
        ([{"type": "text", "text": "<image> or <image>?"}, GOOD_ITEM], "item"),
        ([make_item({"image_embeds": make_array(3, 3)})], "item"),
    ],
    ids=["another modality", "no item", "two placeholders", "embeddings of another width"],
)
def test_a_malformed_message_is_counted(server: Server, content: list[Any], reason: str) -> None:
    assert_counted(server, "/v1/chat/completions", make_chat(content), "vllm", reason)
    assert_counted(server, "/tokenize", make_chat(content), "vllm", reason)
    assert_counted(server, "/v1/chat/completions", make_chat(content, stream=True), "vllm", reason)


@pytest.mark.parametrize(
    ("content", "options", "reason"),
    [
        ([GOOD_ITEM], {"temperature": -1}, "sampling"),
        ([GOOD_ITEM], {"items": {"image": []}}, "item"),
        ([GOOD_ITEM], {"model": "gpt"}, "schema"),
        ([GOOD_ITEM], {"messages": 5}, "schema"),
        ([GOOD_ITEM], {"guided": "x" * 100, "tools": [{"type": "function"}]}, "schema"),
        ([{"type": "text", "text": "what is it? " * 2000}], {"top_k": 1}, "prompt"),
    ],
    ids=["temperature", "items", "model", "messages", "tools", "a long prompt"],
)
def test_a_malformed_chat_is_counted(server: Server, content: list[Any], options: dict[str, Any], reason: str) -> None:
    assert_counted(server, "/v1/chat/completions", make_chat(content, **options), "vllm", reason)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "what is it?"}, "item"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"promt": QUESTION}, "schema"),
        ({"max_tokens": 5}, "sampling"),
        ({"sampling_params": {"temperature": -1}}, "sampling"),
        ({"items": {"image": [make_array(8, 8, 2)]}}, "item"),
        ({"items": {"image": [make_array(2**13, 2**13, 3, data=b"")]}}, "limit"),
    ],
    ids=["no placeholder", "null", "an id", "a field", "beside", "temperature", "an item", "a large item"],
)
def test_a_malformed_request_of_mmkits_own_route_is_counted(
    server: Server, fields: dict[str, Any], reason: str
) -> None:
    body = {"prompt": QUESTION, "items": {"image": [make_array(8, 8, 3)]}} | fields
    assert_counted(server, "/v1/mm/generate", body, "generate", reason)


# -- the end -----------------------------------------------------------------------------------------------------------

TEXT_CHAT = {"model": "llava", "messages": [{"role": "user", "content": "what is it?"}]}
TEXT = {"model": "llava", "prompt": "what is it?"}
REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/health", None),
    ("POST", "/v1/chat/completions", TEXT_CHAT),
    ("POST", "/v1/mm/generate", {"prompt": QUESTION, "items": {"image": encode_pictures(PICTURES[0])}}),
    ("GET", "/v1/mm/modalities", None),
    ("POST", "/v1/completions", TEXT),
    ("POST", "/tokenize", TEXT),
    ("GET", "/v1/models", None),
]


def test_a_server_that_stops_says_so_at_every_route_and_finishes_its_answers(server: Server, client: Client) -> None:
    max_tokens = client.modalities().max_model_len - 400
    events = client.stream(QUESTION, PICTURE, n=8, max_tokens=max_tokens, temperature=1.0, ignore_eos=True)
    with clients.open_session(server) as waiting:
        next(events)
        server.process.terminate()
        assert [message["type"] for message in clients.receive_rest(waiting)] == ["ready", "closed"]
        assert waiting.close_code == 1012
    for method, path, body in REQUESTS * 3:
        refusal = httpx.request(method, server.url + path, json=body, timeout=TIMEOUT)
        assert refusal.status_code == 503, path
        assert refusal.headers["retry-after"] == "1"
    with pytest.raises(RequestError) as denied, client.session(QUESTION, PICTURE, **SAMPLING):
        pass
    assert denied.value.code == 503
    num_finished = 0
    for event in events:
        for choice in event.choices:
            num_finished += choice.finish_reason == "length"
    assert num_finished == 8
    assert server.process.wait(TIMEOUT) == 0
