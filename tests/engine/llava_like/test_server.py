"""Texts, images and precomputed embeddings over HTTP: the answers of the engine, which are those of transformers."""

import itertools
import json
import re
import select
import socket
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from examples.llava_like import ARCHITECTURE
from examples.llava_like.cases import Case, draw_picture
from examples.llava_like.offline import answer
from examples.llava_like.reference import Reference
from examples.llava_like.spec import LLAVA_LIKE
from examples.server import Server
from mmkit.serve import Client, RequestError, content_part
from mmkit.serve.messages import ANTHROPIC, CHAT, RESPONSES, Form
from mmkit.serve.wire import ITEM_URL, encode
from mmkit.testing import of_spec
from tests.engine.terra_server import clients
from tests.profiles import scaled

pytestmark = pytest.mark.timeout(600)

OPTIONS = (
    "--dtype float32 --block-size 32 --enable-mm-embeds --served-model-name llava --max-num-seqs 16 --enforce-eager "
    "--additional-config.render_processes 2 --enable-prompt-embeds --shutdown-timeout 60"
)
SAMPLING: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
PICTURES = [draw_picture(seed) for seed in range(3)]
PICTURE = {"image": PICTURES[:1]}
QUESTION = "USER: <image>\nwhat is it? ASSISTANT:"
PLACEHOLDER = 3


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (*OPTIONS.split(), "--hf-overrides", f'{{"architectures": ["{ARCHITECTURE}"]}}')
    with Server(checkpoint, *options, log=tmp_path_factory.mktemp("serve") / "log") as server:
        head = psutil.Process(server.process.pid)
        assert sum(child.nice() > head.nice() for child in head.children()) == 2, "processes that render"
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout=240) as client:
        yield client


def expected(llava: Any, prompt: str | list[int], images: Sequence[Any]) -> list[int]:
    """The ids of the engine."""
    return answer(llava, [Case(prompt, tuple(images)).request()])[0]


def generated(client: Client, images: Any = PICTURE, **options: Any) -> list[int]:
    return client.generate(QUESTION, images, **{**SAMPLING, **options}).choices[0].token_ids


def test_texts_and_ids_with_images(client: Client, cases: list[Case], answers: list[list[int]]) -> None:
    for case, ids in zip(cases[:12], answers, strict=False):
        (choice,) = client.generate(case.prompt, {"image": case.images} if case.images else None, **SAMPLING).choices
        assert choice.token_ids == ids, case.kind


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 1e38])
def test_embeddings_of_a_prompt_reach_nobody_else(value: float, server: Server, client: Client) -> None:
    """At either route: what the KV cache must not hold is refused, and the next answer is what it was."""
    before = generated(client)
    file = BytesIO()
    torch.save(torch.full((40, 64), value), file)
    rows = b64encode(file.getvalue()).decode()
    parts = [{"type": "text", "text": "hi"}, {"type": "prompt_embeds", "data": rows}]
    bodies = {
        "/v1/completions": {"prompt_embeds": rows},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": parts}]},
    }
    for path, body in bodies.items():
        answer = httpx.post(f"{server.url}{path}", json={"model": "llava", **body}, timeout=60)
        assert answer.status_code == 400, answer.text
        assert "llava_like.prompt_embeds: expected " in answer.text
    assert generated(client) == before


def test_a_dialogue_is_the_prompt_so_far(client: Client, tokenizer: Any, llava: Any) -> None:
    """A text after the first is tokenized by itself, without another <s>."""
    with client.session(QUESTION, PICTURE, **SAMPLING) as session:
        reply = session.first.token_ids
        assert reply == expected(llava, QUESTION, PICTURES[:1])
        whole = [*tokenizer.encode(QUESTION), *reply, *tokenizer.encode(QUESTION, add_special_tokens=False)]
        assert session.next({"image": PICTURES[1:2]}, QUESTION).token_ids == expected(llava, whole, PICTURES[:2])


def test_embeddings_computed_before(client: Client, reference: Reference) -> None:
    """They are the image's, and of the right number of rows."""
    (rows,) = reference.embed(PICTURES[:1])
    assert generated(client, {"image": {"image_embeds": rows[None]}}) == generated(client)
    with pytest.raises(RequestError, match="llava_like") as caught:
        generated(client, {"image": {"image_embeds": rows[None, :-1]}})
    assert (caught.value.code, caught.value.param) == (400, "items.image[0]")


def test_answers_tell_the_whole_prompt(client: Client, cases: list[Case], tokenizer: Any, checkpoint: Path) -> None:
    """Its ids are what the plan expands the request to, and the ranges are those of its items."""
    plan = of_spec(LLAVA_LIKE, checkpoint).processor.plan
    for case in cases[: scaled(24)]:
        written = tokenizer.encode(case.prompt) if isinstance(case.prompt, str) else case.prompt
        images: Any = {"image": case.images} if case.images else None
        told = client.generate(case.prompt, images, max_tokens=1, return_token_ids=True)
        assert plan.unexpand(told.prompt_token_ids, images or {}) == written
        ranges = told.mm_placeholders.get("image", [])
        inside = [told.prompt_token_ids[place.offset : place.offset + place.length] for place in ranges]
        assert [set(ids) for ids in inside] == [{PLACEHOLDER}] * len(case.images)
        assert sum(map(len, inside)) == told.prompt_token_ids.count(PLACEHOLDER)
        events = list(client.stream(case.prompt, images, max_tokens=2, ignore_eos=True, return_token_ids=True))
        assert [event.prompt_token_ids is not None for event in events] == [True, *[False] * (len(events) - 1)]
        assert client.generate(case.prompt, images, max_tokens=1).mm_placeholders is None


# -- what the text must be ---------------------------------------------------------------------------------------------

TO_THE_END = {"max_tokens": 64, "ignore_eos": False}


def test_what_the_text_must_be(client: Client) -> None:
    options = {**SAMPLING, **TO_THE_END, "structured_outputs": {"choice": ["a cat", "a dog"]}}
    (choice,) = client.generate(QUESTION, PICTURE, **options).choices
    assert (choice.finish_reason, choice.text in ("a cat", "a dog")) == ("stop", True), choice.text


CONSTRAINED = "structured_outputs: expected"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"structured_outputs": {}}, f"{CONSTRAINED} parameters that vLLM takes, got You must use one kind"),
        ({"structured_outputs": {"x": "a"}}, "structured_outputs.x: expected one of json, regex, "),
        ({"structured_outputs": {"regex": "[a"}}, "Grammar error"),
        ({"structured_outputs": {"regex": r"\p{Greek}+"}}, f"{CONSTRAINED} one that the model's tokens can follow"),
    ],
)
def test_constraints_that_are_refused(client: Client, options: dict[str, Any], sentence: str) -> None:
    """By the routes, by vLLM before the engine, and in it; the answers of others are the same."""
    before = generated(client)
    with pytest.raises(RequestError) as caught:
        generated(client, **TO_THE_END, **options)
    assert caught.value.code == 400
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert generated(client) == before


# -- pictures ----------------------------------------------------------------------------------------------------------


def parts(*pictures: Any) -> list[Any]:
    """As they stand in a request of our own routes."""
    return encode({"image": list(pictures)})["image"]


def at(url: str) -> dict[str, Any]:
    return {"image_url": {"url": url}}


BOMB, HALF_A_BOMB = Image.new("1", (6000, 6000)), Image.new("1", (5000, 5000))
"""A few KB; one or both have more pixels than MMKIT_SERVE_PIXELS."""


def own(*pictures: Any) -> list[dict[str, Any]]:
    """Parts of a chat in the forms of our own routes."""
    return [{"type": "image", "image": part} for part in parts(*pictures)]


def urls(*pictures: Any) -> list[dict[str, Any]]:
    return [{"type": "image_url", **part} for part in parts(*pictures)]


def as_file(tensor: torch.Tensor) -> str:
    """As vLLM's own parts have precomputed embeddings."""
    torch.save(tensor, file := BytesIO())
    return b64encode(file.getvalue()).decode()


def chat(server: Server, images: list[Any], text: str = "what is it?", **options: Any) -> tuple[int, str]:
    """Status, and answer or refusal, of a request at vLLM's own chat route."""
    message = {"role": "user", "content": [*images, {"type": "text", "text": text}]}
    body = {"model": "llava", "messages": [message], **SAMPLING, **options}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=240)
    told = response.json()
    return response.status_code, told["error"]["message"] if "error" in told else told["choices"][0]["message"][
        "content"
    ]


def test_chats_run_the_same_spec(server: Server, tokenizer: Any, llava: Any, reference: Reference) -> None:
    """With a picture as in any chat, with others in the forms of our own routes beside it, and with embeddings."""

    def text(*pictures: Any) -> tuple[int, str]:
        message = {"role": "user", "content": "<image>\n" * len(pictures) + "what is it?"}
        prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return 200, tokenizer.decode(expected(llava, tokenizer.encode(prompt, add_special_tokens=False), pictures))

    assert chat(server, urls(PICTURES[0])) == text(PICTURES[0])
    pixels = torch.tensor(np.array(PICTURES[2].convert("RGB")))
    assert chat(server, [*urls(PICTURES[0]), *own(PICTURES[1], pixels)]) == text(*PICTURES)
    rows = encode({"rows": [reference.embed([picture])[0] for picture in PICTURES]})["rows"]
    embeds = [{"type": "image", "image": {"image_embeds": one}} for one in rows]
    assert chat(server, embeds) == text(*PICTURES)
    through = [content_part("image", picture, as_url=True) for picture in PICTURES]
    assert chat(server, [through[0], *own(PICTURES[1]), through[2]]) == text(*PICTURES)
    theirs = [{"type": "image_embeds", "image_embeds": as_file(reference.embed([one])[0])} for one in PICTURES]
    assert chat(server, theirs) == text(*PICTURES)
    status, refusal = chat(server, [*embeds[:2], *own(PICTURES[1])])
    assert status == 400
    assert refusal == "messages: expected image_embeds in all parts, with the same fields, got others as well."
    assert chat(server, urls(PICTURES[0])) == text(PICTURES[0])


def of_url(rest: str) -> dict[str, Any]:
    return {"type": "image_url", **at(f"{ITEM_URL}{rest}")}


def generating(server: Server, images: list[Any]) -> tuple[int, str]:
    """Status and text of an answer of our own route."""
    body = {"prompt": QUESTION, "items": {"image": images}, "sampling_params": SAMPLING}
    response = httpx.post(f"{server.url}/v1/mm/generate", json=body, timeout=240)
    return response.status_code, response.text


ASIDE = partial(chat, text="<image> or <image>?")
REFUSED = [
    (generating, [at("data:image/png;base64,AAAA")], 400, "items.image[0]"),
    (generating, [at("file:///etc/passwd")], 400, "items.image[0]"),
    (generating, parts(BOMB), 413, "MMKIT_SERVE_PIXELS"),
    (generating, parts(*[HALF_A_BOMB] * 4), 413, "MMKIT_SERVE_PIXELS"),  # also without placeholders
    (generating, parts(*PICTURES[:2]), 400, "2 targets"),
    (chat, urls(BOMB), 413, "messages[0].content[0]: expected at most 33554432 pixels in one request, got more."),
    (chat, urls(*[HALF_A_BOMB] * 2), 413, "messages[0].content[1]: expected at most 33554432 pixels in one request"),
    (chat, own(*[HALF_A_BOMB] * 2), 413, "messages[0].content[1].image: expected at most 33554432 pixels in one"),
    (ASIDE, urls(PICTURES[0]), 400, "placeholder"),
    (ASIDE, [], 400, "placeholder"),
    (chat, [{"type": "image", "image": {"image_url": 1}}], 400, "content[0].image.image_url: expected object, got"),
    (chat, [of_url("image;base64,*")], 400, "messages[0].content[0]: expected base64 in the URL of an item, got an"),
    (chat, [of_url("video;base64,AAAA")], 400, "content[0]: expected one of image as the modality of a URL, got 'v"),
]


@pytest.mark.parametrize(("ask", "images", "code", "words"), REFUSED, ids=itertools.count())
def test_what_is_no_image_or_too_much(server: Server, ask: Any, images: list[Any], code: int, words: str) -> None:
    """Pictures are weighed before they are decoded."""
    status, told = ask(server, images)
    assert (status, words in told) == (code, True), told


# -- the same conversation at every route ------------------------------------------------------------------------------

FORMS_OF_PICTURES = ("url", "own", "gateway")
MISTAKES: dict[str, Any] = {
    "shape": {"data": b64encode(b"\0" * 6).decode(), "dtype": "uint8", "shape": [2, 3]},
    "dtype": {"data": "", "dtype": "complex64", "shape": [0]},
    "text": "data:image/png;base64,AAAA",
    "null": None,
}
TEXTS = st.sampled_from(["what is it?", "a", "<image>", "or <image> this"])
A_PART = (
    st.tuples(st.just("text"), TEXTS)
    | st.tuples(st.sampled_from(FORMS_OF_PICTURES), st.integers(0, 2))
    | st.tuples(st.just("wrong"), st.sampled_from(sorted(MISTAKES)))
)
CONVERSATIONS = st.lists(st.lists(A_PART, min_size=1, max_size=3), min_size=1, max_size=3).filter(
    lambda messages: sum(kind != "text" for parts in messages for kind, _ in parts) <= 2
)
"""Kinds and contents of the parts of each message."""

GREEDY = {"temperature": 0.0}


class Told(NamedTuple):
    """What a route makes of a conversation: the number of tokens of the prompt, its ids where the route tells them, and
    the text that follows; or the status and the sentence of a refusal without its path."""

    tokens: int = 0
    ids: list[int] | None = None
    text: str | None = None
    status: int = 200
    sentence: str = ""


def written(form: Form, conversation: Any) -> list[Any]:
    """The messages of a body."""
    messages = []
    for parts in conversation:
        content: list[Any] = []
        for kind, what in parts:
            if kind == "text":
                content.append({"type": "input_text" if form is RESPONSES else "text", "text": what})
            elif kind == "wrong":
                content.append({"type": "image", "image": MISTAKES[what]})
            elif kind == "own":
                content += own(PICTURES[what])
            elif kind == "gateway":
                url = content_part("image", PICTURES[what], as_url=True)["image_url"]["url"]
                content.append(form.picture(url))
            else:
                url = parts_url(PICTURES[what])
                base64 = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
                picture = {"type": "image", "source": base64} if form is ANTHROPIC else form.picture(url)
                content.append(picture)
        messages.append({"role": "user", "content": content})
    return messages


def parts_url(picture: Any) -> str:
    (part,) = encode({"image": [picture]})["image"]
    return str(part["image_url"]["url"])


def ask_chat(server: Server, conversation: Any) -> Told:
    body = {"messages": written(CHAT, conversation), "max_tokens": 8, "return_token_ids": True, **GREEDY}
    told, refusal = posted(server, "/v1/chat/completions", body)
    if refusal:
        return refusal
    return Told(told["usage"]["prompt_tokens"], told["prompt_token_ids"], told["choices"][0]["message"]["content"])


def ask_batch(server: Server, conversation: Any) -> Told:
    body = {"messages": [written(CHAT, conversation)] * 2, "max_tokens": 8, **GREEDY}
    told, refusal = posted(server, "/v1/chat/completions/batch", body)
    if refusal:
        return refusal
    one, two = [choice["message"]["content"] for choice in told["choices"]]
    assert one == two
    return Told(told["usage"]["prompt_tokens"] // 2, None, one)


def ask_tokenize(server: Server, conversation: Any) -> Told:
    told, refusal = posted(server, "/tokenize", {"messages": written(CHAT, conversation)})
    return refusal or Told(told["count"], told["tokens"])


def ask_responses(server: Server, conversation: Any) -> Told:
    body = {"input": written(RESPONSES, conversation), "max_output_tokens": 8, **GREEDY}
    told, refusal = posted(server, "/v1/responses", body)
    if refusal:
        return refusal
    texts = [part["text"] for output in told["output"] for part in output["content"]]
    return Told(told["usage"]["input_tokens"], None, "".join(texts))


def ask_messages(server: Server, conversation: Any) -> Told:
    body = {"model": "llava", "messages": written(ANTHROPIC, conversation), "max_tokens": 8, **GREEDY}
    told, refusal = posted(server, "/v1/messages", body)
    if refusal:
        return refusal
    counted, _ = posted(server, "/v1/messages/count_tokens", {**body, "max_tokens": 1})
    assert counted["input_tokens"] == told["usage"]["input_tokens"]
    return Told(told["usage"]["input_tokens"], None, "".join(part["text"] for part in told["content"]))


def posted(server: Server, path: str, body: Any) -> tuple[Any, Told | None]:
    """An answer, or a refusal."""
    response = httpx.post(f"{server.url}{path}", json={"model": "llava", **body}, timeout=240)
    told = response.json()
    if response.status_code == 200:
        return told, None
    message = told["error"]["message"]
    if message.startswith("Found more "):  # vLLM's own, of placeholders without an item
        return told, Told(status=response.status_code, sentence=message.partition(" (parameter=")[0])
    where, _, sentence = message.partition(": ")
    assert where.split("[")[0] in ("messages", "input"), told
    return told, Told(status=response.status_code, sentence=sentence)


WAYS = [ask_batch, ask_tokenize, ask_responses, ask_messages]


def test_a_conversation_is_the_same_at_every_route(server: Server, client: Client) -> None:
    """The same ids and answer, or the same refusal; the client with these ids has the answer, too."""
    outcomes = set()

    @settings(max_examples=scaled(12))
    @given(CONVERSATIONS)
    def compared(conversation: Any) -> None:
        expected = ask_chat(server, conversation)
        outcomes.add(expected.sentence[:20])
        for ask in WAYS:
            told = ask(server, conversation)
            assert (told.status, told.sentence, told.tokens) == (expected.status, expected.sentence, expected.tokens)
            assert told.ids in (None, expected.ids), ask.__name__
            assert told.text in (None, expected.text), ask.__name__
        if expected.status == 200:
            pictures = [PICTURES[what] for parts in conversation for kind, what in parts if kind != "text"]
            items = {"image": pictures} if pictures else None
            generation = client.generate(expected.ids, items, max_tokens=8, return_token_ids=True, **GREEDY)
            assert generation.prompt_token_ids == expected.ids
            assert generation.choices[0].text == expected.text

    compared()
    assert len(outcomes) >= 4, outcomes


def test_an_item_of_the_request_before_is_none_of_this_one(server: Server) -> None:
    """Both come in one segment, and the server begins the second in the context of the first."""

    def request(parts: list[Any], header: str) -> bytes:
        body = json.dumps({"model": "llava", "messages": [{"role": "user", "content": parts}], **SAMPLING})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{header}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    reference = {"type": "image_url", **at("mmkit-item:0")}
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as connection:
        connection.sendall(request(own(PICTURES[0]), "") + request([reference], "Connection: close\r\n"))
        answers = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"400"], answers


def test_urls_in_a_chat_are_not_fetched(server: Server) -> None:
    """Nor files read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        for odd in (url, "file:///etc/hostname", url.upper(), "ftp://127.0.0.1/x"):
            status, refusal = chat(server, [{"type": "image_url", **at(odd)}])
            assert status == (500 if odd[:5] == "file:" else 400), refusal  # vLLM's statuses
        assert not select.select([listener], [], [], 0)[0]  # nobody has connected


def test_names_of_other_tenants(server: Server, client: Client) -> None:
    """Whatever the route, an item without data is one that the same tenant has named."""
    salt: Any = {"cache_salt": "alice"}

    def absent(uuid: str) -> list[Any]:
        return [{"type": "image_url", "image_url": None, "uuid": uuid}]

    named = chat(server, [{**urls(PICTURES[0])[0], "uuid": "x"}], **salt)
    first = generated(client, uuids={"image": ["y"]}, **salt)
    assert named[0] == 200
    assert chat(server, absent("x"), **salt) == named
    assert generated(client, {"image": [None]}, uuids={"image": ["y"]}, **salt) == first
    for uuid in ("x", "y"):
        for other in ({}, {"cache_salt": "bob"}):
            assert chat(server, absent(uuid), **other)[0] == 400
            with pytest.raises(RequestError, match="no such item"):
                generated(client, {"image": [None]}, uuids={"image": [uuid]}, **other)


# -- what is counted, and the end --------------------------------------------------------------------------------------


def counted(server: Server) -> Counter[tuple[str, str]]:
    """Refusals, by route and reason."""
    pattern = re.compile(r'mmkit:refused_requests_total{.*,reason="(.*)",route="(.*)"} (.*)')
    found = pattern.finditer(httpx.get(f"{server.url}/metrics", timeout=240).text)
    counts: Counter[tuple[str, str]] = Counter()
    for reason, route, count in (match.groups() for match in found):
        counts[route, reason] += int(float(count))
    return counts


def item(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def array(*shape: int, dtype: str = "uint8", data: bytes | None = None) -> dict[str, Any]:
    written = bytes(int(np.prod(shape))) if data is None else data
    return {"data": b64encode(written).decode(), "dtype": dtype, "shape": [*shape]}


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


MALFORMED_ITEMS: list[tuple[Any, str]] = [
    (array(8, 8, 2), "item"),
    (array(8), "item"),
    (array(0, 8, 3), "item"),
    ([[[1, 2, 3]], [[1, 2]]], "item"),
    ([[[1e39, 0, 0]]], "item"),
    ([[[70000, 0, 0]]], "item"),
    (array(1, 1, 3, dtype="float32", data=np.full(3, np.nan, np.float32).tobytes()), "item"),
    ([[["a", "b", "c"]]], "item"),
    ({"data": "%%%", "dtype": "uint8", "shape": [8, 8, 3]}, "item"),
    (array(8, 8, 3, data=b"short"), "item"),
    (array(8, 8, 3, dtype="float99"), "item"),
    ({"x": 1}, "item"),
    ({"image_url": 1}, "item"),
    (nested(40), "item"),
    (at("data:image/png;base64,AAAA"), "item"),
    (5, "item"),
    (at(urls(BOMB)[0]["image_url"]["url"]), "limit"),
]
GOOD = item(array(8, 8, 3))
MALFORMED_CHATS: list[tuple[list[Any], dict[str, Any], str]] = [
    ([{"type": "cloud", "cloud": [1]}], {}, "item"),
    ([{"type": "image"}], {}, "item"),
    ([{"type": "text", "text": "<image> or <image>?"}, GOOD], {}, "item"),
    ([{"type": "image", "image": {"image_embeds": array(3, 3)}}], {}, "item"),
    ([GOOD], {"temperature": -1}, "sampling"),
    ([GOOD], {"items": {"image": []}}, "item"),
    ([GOOD], {"model": "gpt"}, "schema"),
    ([GOOD], {"messages": 5}, "schema"),
    ([GOOD], {"guided": "x" * 100, "tools": [{"type": "function"}]}, "schema"),
    ([{"type": "text", "text": "what is it? " * 2000}], {"top_k": 1}, "prompt"),
]
MALFORMED_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "what is it?"}, "item"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"promt": QUESTION}, "schema"),
    ({"max_tokens": 5}, "sampling"),
    ({"sampling_params": {"temperature": -1}}, "sampling"),
    ({"items": {"image": [array(8, 8, 2)]}}, "item"),
    ({"items": {"image": [array(2**13, 2**13, 3, data=b"")]}}, "limit"),
]


def test_every_refusal_is_counted(server: Server) -> None:
    """On vLLM's routes as on those of mmkit, also where the answer would be a stream."""
    before, expected = counted(server), Counter[tuple[str, str]]()

    def refused(route: str, body: dict[str, Any], reason: str, label: str = "vllm") -> None:
        answer = httpx.post(f"{server.url}{route}", json=body, timeout=240)
        assert 400 <= answer.status_code < 500, answer.text
        expected[label, reason] += 1

    chats = [([item(value)], {}, reason) for value, reason in MALFORMED_ITEMS]
    for content, options, reason in [*chats, *MALFORMED_CHATS]:
        text = {"type": "text", "text": "what is it?"}
        message = {"role": "user", "content": [*content, text]}
        for route in ("/v1/chat/completions", "/tokenize")[: 1 + (not options)]:
            refused(route, {"model": "llava", "messages": [message], **SAMPLING, **options}, reason)
        if not options:
            refused("/v1/chat/completions", {"model": "llava", "messages": [message], "stream": True}, reason)
    for options, reason in MALFORMED_REQUESTS:
        body = {"prompt": QUESTION, "items": {"image": [array(8, 8, 3)]}, **options}
        refused("/v1/mm/generate", body, reason, "generate")
    assert counted(server) - before == expected


def test_a_server_that_stops(server: Server, client: Client) -> None:
    """Is told so at once by every route, until what is under way is answered."""
    asked: list[tuple[str, str, Any]] = [
        ("GET", "/health", None),
        ("POST", "/v1/chat/completions", {"model": "llava", "messages": [{"role": "user", "content": "what is it?"}]}),
        ("POST", "/v1/mm/generate", {"prompt": QUESTION, "items": {"image": parts(PICTURES[0])}}),
        ("GET", "/v1/mm/modalities", None),
        ("POST", "/v1/completions", {"model": "llava", "prompt": "what is it?"}),
        ("POST", "/tokenize", {"model": "llava", "prompt": "what is it?"}),
        ("GET", "/v1/models", None),
    ]
    most = client.modalities().max_model_len - 400
    long = client.stream(QUESTION, PICTURE, n=8, max_tokens=most, temperature=1.0, ignore_eos=True)
    with clients.opened(server) as waiting:
        next(long)
        server.process.terminate()
        assert [message["type"] for message in clients.rest(waiting)] == ["ready", "closed"]
        assert waiting.close_code == 1012
    for number in range(21):
        method, route, body = asked[number % len(asked)]
        answer = httpx.request(method, server.url + route, json=body, timeout=240)
        assert (route, answer.status_code, answer.headers["retry-after"]) == (route, 503, "1")
    with pytest.raises(RequestError) as denied, client.session(QUESTION, PICTURE, **SAMPLING):
        pass
    assert denied.value.code == 503
    assert sum(choice.finish_reason == "length" for event in long for choice in event.choices) == 8
    assert server.process.wait(240) == 0
