"""The same conversation at every route of the server: the same ids and answer, or the same refusal."""

from base64 import b64encode
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.server import Server
from mmkit.serve import Client
from mmkit.serve.messages import ANTHROPIC, CHAT, RESPONSES, MessageFormat
from tests.engine.llava_like.bodies import (
    PICTURES,
    get_data_url,
    make_gateway_part,
    make_item,
    make_item_parts,
    post,
)
from tests.profiles import scaled

pytestmark = pytest.mark.timeout(600)

MALFORMED_ITEMS: dict[str, Any] = {
    "shape": {"data": b64encode(b"\0" * 6).decode(), "dtype": "uint8", "shape": [2, 3]},
    "dtype": {"data": "", "dtype": "complex64", "shape": [0]},
    "text": "data:image/png;base64,AAAA",
    "null": None,
}
GREEDY = {"temperature": 0.0}


# -- conversations -----------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A part of a message.

    Attributes:
        kind: text; item, url or gateway for a picture; or malformed.
        content: a text, the number of a picture, or a name in MALFORMED_ITEMS.
    """

    kind: str
    content: Any


Conversation = list[list[Part]]
"""The parts of each message."""

TEXTS = st.builds(Part, st.just("text"), st.sampled_from(["what is it?", "a", "<image>", "or <image> this"]))
PICTURE_PARTS = st.builds(Part, st.sampled_from(["url", "item", "gateway"]), st.integers(0, 2))
MALFORMED_PARTS = st.builds(Part, st.just("malformed"), st.sampled_from(sorted(MALFORMED_ITEMS)))
PARTS = TEXTS | PICTURE_PARTS | MALFORMED_PARTS


def has_at_most_two_items(conversation: Conversation) -> bool:
    return len([part for part in join(conversation) if part.kind != "text"]) <= 2


def join(conversation: Conversation) -> list[Part]:
    """Return the parts of all messages."""
    parts = []
    for message in conversation:
        parts.extend(message)
    return parts


MESSAGES = st.lists(PARTS, min_size=1, max_size=3)
CONVERSATIONS = st.lists(MESSAGES, min_size=1, max_size=3).filter(has_at_most_two_items)


def make_messages(form: MessageFormat, conversation: Conversation) -> list[Any]:
    """Return the messages of a body."""
    messages = []
    for parts in conversation:
        content = [make_part(form, part) for part in parts]
        messages.append({"role": "user", "content": content})
    return messages


def make_part(form: MessageFormat, part: Part) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "input_text" if form is RESPONSES else "text", "text": part.content}
    if part.kind == "malformed":
        return make_item(MALFORMED_ITEMS[part.content])
    picture = PICTURES[part.content]
    if part.kind == "item":
        (item_part,) = make_item_parts(picture)
        return item_part
    if part.kind == "gateway":
        return form.picture(make_gateway_part(picture)["image_url"]["url"])
    url = get_data_url(picture)
    if form is ANTHROPIC:
        data = url.partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    return form.picture(url)


# -- routes ------------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a route makes of a conversation.

    Attributes:
        num_tokens: of the prompt.
        ids: of the prompt; None where the route does not say them.
        text: what follows; None where the route generates none.
        status: of HTTP.
        sentence: of a refusal, without its path.
    """

    num_tokens: int = 0
    ids: list[int] | None = None
    text: str | None = None
    status: int = 200
    sentence: str = ""


class Refused(Exception):
    """A route refuses a conversation.

    Attributes:
        outcome: the refusal.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.sentence)
        self.outcome = outcome


def ask(server: Server, path: str, body: Any) -> Any:
    """Return the answer of a route.

    Raises:
        Refused: there is none.
    """
    response = post(server, path, {"model": "llava", **body})
    value = response.json()
    if response.status_code == 200:
        return value
    message = value["error"]["message"]
    if message.startswith("Found more "):  # vLLM's own, of placeholders without an item
        sentence = message.partition(" (parameter=")[0]
    else:
        where, _, sentence = message.partition(": ")
        assert where.split("[")[0] in ("messages", "input"), value
    raise Refused(Outcome(status=response.status_code, sentence=sentence))


def ask_chat(server: Server, conversation: Conversation) -> Outcome:
    body = {"messages": make_messages(CHAT, conversation), "max_tokens": 8, "return_token_ids": True, **GREEDY}
    value = ask(server, "/v1/chat/completions", body)
    text = value["choices"][0]["message"]["content"]
    return Outcome(value["usage"]["prompt_tokens"], value["prompt_token_ids"], text)


def ask_batch(server: Server, conversation: Conversation) -> Outcome:
    body = {"messages": [make_messages(CHAT, conversation)] * 2, "max_tokens": 8, **GREEDY}
    value = ask(server, "/v1/chat/completions/batch", body)
    first, second = [choice["message"]["content"] for choice in value["choices"]]
    assert first == second
    return Outcome(value["usage"]["prompt_tokens"] // 2, None, first)


def ask_tokenize(server: Server, conversation: Conversation) -> Outcome:
    value = ask(server, "/tokenize", {"messages": make_messages(CHAT, conversation)})
    return Outcome(value["count"], value["tokens"])


def ask_responses(server: Server, conversation: Conversation) -> Outcome:
    body = {"input": make_messages(RESPONSES, conversation), "max_output_tokens": 8, **GREEDY}
    value = ask(server, "/v1/responses", body)
    text = ""
    for output in value["output"]:
        for part in output["content"]:
            text += part["text"]
    return Outcome(value["usage"]["input_tokens"], None, text)


def ask_messages(server: Server, conversation: Conversation) -> Outcome:
    body = {"messages": make_messages(ANTHROPIC, conversation), "max_tokens": 8, **GREEDY}
    value = ask(server, "/v1/messages", body)
    count = ask(server, "/v1/messages/count_tokens", {**body, "max_tokens": 1})
    assert count["input_tokens"] == value["usage"]["input_tokens"]
    text = "".join(part["text"] for part in value["content"])
    return Outcome(value["usage"]["input_tokens"], None, text)


def try_route(route: Any, server: Server, conversation: Conversation) -> Outcome:
    """Return the answer of a route, or its refusal."""
    try:
        outcome: Outcome = route(server, conversation)
    except Refused as refusal:
        return refusal.outcome
    return outcome


# -- the comparison ----------------------------------------------------------------------------------------------------


def assert_same(outcome: Outcome, expected: Outcome, route: Any) -> None:
    assert outcome.status == expected.status
    assert outcome.sentence == expected.sentence
    assert outcome.num_tokens == expected.num_tokens
    if outcome.ids is not None:
        assert outcome.ids == expected.ids, route.__name__
    if outcome.text is not None:
        assert outcome.text == expected.text, route.__name__


def assert_client_has_the_answer(client: Client, conversation: Conversation, expected: Outcome) -> None:
    """Send the ids of the chat with their pictures to mmkit's own route."""
    pictures = [PICTURES[part.content] for part in join(conversation) if part.kind != "text"]
    items = {"image": pictures} if pictures else None
    generation = client.generate(expected.ids, items, max_tokens=8, return_token_ids=True, **GREEDY)
    assert generation.prompt_token_ids == expected.ids
    assert generation.choices[0].text == expected.text


def test_a_conversation_is_the_same_at_every_route(server: Server, client: Client) -> None:
    beginnings = set()

    @settings(max_examples=scaled(12))
    @given(CONVERSATIONS)
    def compare(conversation: Conversation) -> None:
        expected = try_route(ask_chat, server, conversation)
        beginnings.add(expected.sentence[:20])
        for route in (ask_batch, ask_tokenize, ask_responses, ask_messages):
            assert_same(try_route(route, server, conversation), expected, route)
        if expected.status == 200:
            assert_client_has_the_answer(client, conversation, expected)

    compare()
    assert len(beginnings) >= 4, beginnings
