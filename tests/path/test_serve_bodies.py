"""What vLLM's own routes get of a body, and what is refused before.

The routes, their state and the processor are the real ones; tests/engine/terra_server has the refusals of a server.
"""

import base64
import json
from typing import NamedTuple
from unittest import mock

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from mmkit import InputError
from mmkit.serve.bodies import ITEM_FIELDS
from mmkit.serve.limits import ServerLimits
from mmkit.serve.messages import ANTHROPIC, MESSAGE_FORMATS, RESPONSES, Messages
from mmkit.wire import limits
from mmkit.wire.items import ITEM_DATA_URL
from mmkit.wire.limits import count_values
from tests.path.serve_app import get_shared_state, get_state, serve

pytestmark = pytest.mark.timeout(120)

MANY_IDS = [1] * 20_000
LONG_TEXT = r"[,\"\\" * 400_000
"""A text with signs of JSON, which is longer than any constraint may be."""
TOO_LONG = "expected at most 16384 bytes"
NO_OBJECT = 'body: expected a JSON object in UTF-8, which begins with "{", got '


@pytest.fixture(scope="module")
def client():
    """A client of a server without a tokenizer."""
    with serve(ServerLimits()) as client:
        yield client


def get_message(answer):
    return answer.json()["error"]["message"]


# -- values in JSON ----------------------------------------------------------------------------------------------------


def count(value):
    """Return the number of values in nested lists."""
    if not isinstance(value, list):
        return 1
    total = 1
    for part in value:
        total += count(part)
    return total


NESTED_LISTS = st.recursive(st.text() | st.integers() | st.none(), st.lists)


@given(NESTED_LISTS, st.sampled_from([1, 2, 3, 10**6]), st.booleans())
def test_values_in_json_are_counted_outside_of_texts(value, chunk_bytes, ascii):
    """However the body is cut into chunks."""
    raw = json.dumps({"a": value}, ensure_ascii=ascii).encode()
    with mock.patch.object(limits, "CHUNK_BYTES", chunk_bytes):
        bound = count_values(raw) + 1
    assert count(value) <= bound <= 2 * count(value) + 2


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": MANY_IDS},
        {"token_ids": MANY_IDS},
        {"prompt": LONG_TEXT},
        {"messages": [{"content": LONG_TEXT}]},
        {"tools": [LONG_TEXT], "text": LONG_TEXT, "tool_choice": "auto"},
    ],
    ids=["prompt", "token_ids", "text", "message", "tools that may be called"],
)
def test_a_long_prompt_passes(client, body):
    assert client.post("/v1/other", json=body).status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"prompt": "x", "messages": ["1"] * 20_000},
            "body: expected at most 16384 values in JSON beside those of a prompt, got",
        ),
        ({"prompt": [[1] * 2**20]}, "body: expected at most 1048576 values in JSON, got more."),
        (
            {"response_format": {"a": LONG_TEXT}, "messages": []},
            f"response_format: {TOO_LONG}, got more. Send less at once",
        ),
        ({"tools": [LONG_TEXT], "tool_choice": "required"}, f"tools: {TOO_LONG}"),
        ({"tools": [{"function": {"strict": True, "a": LONG_TEXT}}]}, f"tools: {TOO_LONG}"),
        ({"text": {"format": LONG_TEXT}}, f"text: {TOO_LONG}"),
        ({"output_config": {"format": LONG_TEXT}}, f"output_config: {TOO_LONG}"),
        (
            {"sampling_params": {"structured_outputs": {"regex": LONG_TEXT}}},
            f"sampling_params.structured_outputs: {TOO_LONG}",
        ),
    ],
    ids=["values", "ids", "response_format", "tools", "strict tools", "text", "output_config", "structured_outputs"],
)
def test_a_body_beyond_a_limit_is_refused(client, body, message):
    answer = client.post("/v1/other", json=body)
    assert answer.status_code == 413
    assert get_message(answer).startswith(message)
    assert len(answer.content) < 2048


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({}, "prompt[20000]: expected int | str | array, got object."),
        ("a", "prompt: expected a list of ids, of texts or of lists of ids, got a mixed one."),
    ],
    ids=["object", "text"],
)
def test_a_long_prompt_that_is_malformed_is_refused_at_its_first_mistake(client, last, message):
    answer = client.post("/v1/other", json={"prompt": [*MANY_IDS, last]})
    assert answer.status_code == 400
    assert get_message(answer) == message


# -- one parser --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'\xef\xbb\xbf{"a": 1}', rf"""{NO_OBJECT}'\xef\xbb\xbf{{"a":'."""),
        ('{"∀":[]}'.encode("utf-16"), NO_OBJECT),  # U+2200 has the byte of a quote
        (
            '{"a":[]}'.encode("utf-16-le"),
            "body: expected JSON, got invalid JSON at byte 1: object keys must be strings.",
        ),
        (b"\xc2\xa0{}", NO_OBJECT),
        (b"[]", f"{NO_OBJECT}'[]'."),
        (b'"{}"', NO_OBJECT),
        (b"{}{}", "body: expected JSON, got invalid JSON at byte 3: trailing characters."),
        (b"{}\0", "body: expected JSON, got invalid JSON at byte 3: trailing characters."),
        (b'{"a": "\xff"}', "body: expected JSON, got invalid JSON: 'utf-8' codec"),
        (b'{"a": "\\ud800"}', "body: expected JSON, got invalid JSON: "),
        (
            b'{"a": [1, {"b": NaN}]}',
            "a[1].b: expected a number, got NaN, which JSON does not have. Send finite numbers; a",
        ),
        (b'{"a": 1e999}', "body: expected a finite number, got one out of the range of floats."),
        (b'{"a": %s}' % (b"1" * 5000), "body: expected a valid value, got integer value out of range."),
    ],
)
@pytest.mark.parametrize("path", ["/v1/other", "/v1/completions"])
def test_a_malformed_body_reaches_no_route_of_vllm(client, path, body, message):
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert get_message(answer).startswith(message)


@pytest.mark.parametrize("name", [*ITEM_FIELDS, r"\u0069tems"])
def test_items_that_a_route_would_ignore_are_refused(client, name):
    answer = client.post("/v1/other", content=f'{{"{name}": 1}}'.encode())
    plain_name = name.replace(r"\u0069", "i")
    assert answer.status_code == 400
    assert get_message(answer).startswith(f"{plain_name}: expected no items at /v1/other, got some. Send items to")


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)


def collect(inner):
    return st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)


JSON = st.recursive(st.none() | st.booleans() | NUMBERS | st.text(), collect, max_leaves=12)
OBJECTS = st.dictionaries(st.text(max_size=3), JSON, max_size=4)
SPACES = st.text(" \t\n\r", max_size=3)


def has_surrogate(value):
    """Tell whether a text in a value has half of a surrogate pair, which UTF-8 cannot hold."""
    return any("\ud800" <= sign <= "\udfff" for sign in json.dumps(value, ensure_ascii=False))


@given(OBJECTS, SPACES, SPACES, st.booleans())
def test_vllm_gets_what_was_read_encoded_again(client, value, before, after, ascii):
    """The bytes are those of the only parser, whatever the client sent."""
    body = before + json.dumps(value, ensure_ascii=ascii) + after
    answer = client.post("/v1/other", content=body.encode(errors="surrogatepass"))
    if has_surrogate(value):
        assert answer.status_code == 400
        return
    assert answer.status_code == 200, answer.text
    assert answer.content == msgspec.json.encode(value)
    assert json.loads(answer.content) == value


def test_of_equal_keys_vllm_sees_only_the_last(client):
    answer = client.post("/v1/other", content=rb'{"a": 0, "\u0061": [1.50, 0.1e1], "a": 2}')
    assert answer.content == b'{"a":2}'


# -- routes ------------------------------------------------------------------------------------------------------------

FILE = {"file": b"\0,[" * 10**6}


def test_a_route_of_files_reads_files(client):
    assert client.post("/v1/audio/transcriptions", files=FILE).status_code == 200


def test_another_route_reads_no_files(client):
    assert client.post("/v1/other", files=FILE).status_code == 413
    assert get_message(client.post("/v1/other", files={"file": b"a"})).startswith(NO_OBJECT)


def test_a_body_that_only_says_it_has_files_is_refused(client):
    headers = {"content-type": "multipart/form-data; boundary=x"}
    assert client.post("/v1/other", content=b'\xef\xbb\xbf{"a": 1}', headers=headers).status_code == 400


def test_the_routes_of_a_server_behind_a_path_are_the_same():
    """vLLM's --root-path stands in the path of a request."""
    body = {"messages": [{"role": "user", "content": [{"type": "actions"}]}]}
    with serve(ServerLimits()) as client:
        client.app.root_path = "/behind"
        get_state(client).engine.has_tokenizer = True
        answer = client.post("/behind/tokenize", json=body)
    assert answer.json()["error"]["param"] == "messages[0].content[0]"


# -- items in messages -------------------------------------------------------------------------------------------------

ACTION = [[0.5] * 3] * 6
MALFORMED_ACTION = [["x"]]
URL = "data:image/png;base64,AAAA"
PART_KINDS = ("text", "item", "url", "picture", "null")
ITEM_KINDS = ("item", "url")
PATHS = sorted(MESSAGE_FORMATS)


def make_part(path, kind, action):
    """Return a part of a message at a route.

    Args:
        path: of the route.
        kind: of PART_KINDS.
        action: the item, if it has one.
    """
    if kind == "text":
        return {"type": "text", "text": "a"}
    if kind == "null":
        return {"type": "actions", "actions": None, "uuid": "u"}
    if kind == "item":
        return {"type": "actions", "actions": action, "uuid": 3}
    if kind == "url":
        encoded = base64.b64encode(json.dumps(action).encode()).decode()
        return MESSAGE_FORMATS[path].picture(f"{ITEM_DATA_URL}actions;base64,{encoded}")
    return MESSAGE_FORMATS[path].picture(URL)


class Place(NamedTuple):
    """A part of a conversation.

    Attributes:
        kind: of PART_KINDS.
        where: its path in the body.
    """

    kind: str
    where: str

    @property
    def item_where(self):
        """The path of its item."""
        return self.where if self.kind == "url" else f"{self.where}.actions"


class Conversation(NamedTuple):
    """A body with messages.

    Attributes:
        path: of the route.
        body: the body.
        places: its parts in order.
    """

    path: str
    body: dict
    places: list


@st.composite
def conversations(draw, *, malformed=False):
    """Draw a conversation; of a malformed one the last item is malformed, and the others are not."""
    path = draw(st.sampled_from(PATHS))
    field = MESSAGE_FORMATS[path].field
    in_batch = path == "/v1/chat/completions/batch" and draw(st.booleans())
    root = f"{field}[0]" if in_batch else field
    messages = []
    places = []
    for message_index in range(draw(st.integers(1, 3))):
        parts = []
        for part_index in range(draw(st.integers(0, 4))):
            kind = draw(st.sampled_from(PART_KINDS))
            parts.append(make_part(path, kind, ACTION))
            places.append(Place(kind, f"{root}[{message_index}].content[{part_index}]"))
        messages.append({"role": "user", "content": parts})
    if malformed:
        kind = draw(st.sampled_from(ITEM_KINDS))
        places.append(Place(kind, f"{root}[{len(messages)}].content[0]"))
        messages.append({"role": "user", "content": [make_part(path, kind, MALFORMED_ACTION)]})
    body = {field: [messages] if in_batch else messages}
    return Conversation(path, body, places)


def list_parts(conversation):
    """Return the parts of the messages of a body."""
    messages = conversation.body[MESSAGE_FORMATS[conversation.path].field]
    if messages and isinstance(messages[0], list):
        messages = messages[0]
    parts = []
    for message in messages:
        parts.extend(message["content"])
    return parts


@given(conversations())
def test_items_are_moved_out_of_messages_at_every_route(conversation):
    """References are in their place, and the parts are in order."""
    form = MESSAGE_FORMATS[conversation.path]
    messages = Messages(get_shared_state(), form)
    messages.move_items_out(conversation.body)
    remaining_items = list(messages.moved_items)
    for place, part in zip(conversation.places, list_parts(conversation), strict=True):
        if place.kind in ("text", "picture"):
            assert part == make_part(conversation.path, place.kind, None)
            continue
        moved = remaining_items.pop(0)
        assert part == form.picture(moved.url)
        assert moved.where == place.item_where
        assert moved.uuid == {"item": "3", "null": "u", "url": None}[place.kind]
    assert remaining_items == []


@given(conversations())
def test_each_item_of_a_message_has_its_path(conversation):
    messages = Messages(get_shared_state(), MESSAGE_FORMATS[conversation.path])
    messages.move_items_out(conversation.body)
    expected = [place.item_where for place in conversation.places if place.kind not in ("text", "picture")]
    assert list(messages.item_paths[0].get("actions", ())) == expected


@given(conversations(malformed=True))
def test_an_error_names_the_part_of_a_message_that_it_is_about(conversation):
    messages = Messages(get_shared_state(), MESSAGE_FORMATS[conversation.path])
    with pytest.raises(InputError) as caught:
        messages.move_items_out(conversation.body)
    assert caught.value.where == f"{conversation.places[-1].item_where}[0][0]"


ITEM_PART = {"type": "actions", "actions": ACTION}


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (
            ANTHROPIC,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [ITEM_PART]}],
                    }
                ]
            },
        ),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "1", "output": [ITEM_PART]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [ITEM_PART]}], "previous_response_id": "1"}),
    ],
    ids=["Anthropic's result of a tool", "a result of a tool", "a response after another one"],
)
def test_an_item_that_vllm_reads_in_another_order_has_no_path(form, body):
    messages = Messages(get_shared_state(), form)
    messages.move_items_out(body)
    assert len(messages.moved_items) == 1
    assert messages.item_paths == []


ODD_VALUES = st.sampled_from([None, 3, [], {}, "text", "actions", "image_url", "image", {"url": 3}, {"url": "data:"}])
NESTED_FIELDS = st.sampled_from(["content", "output"])


def nest_parts(inner):
    return st.lists(st.dictionaries(NESTED_FIELDS, inner), max_size=2)


ODD_PARTS = st.dictionaries(
    st.sampled_from(["type", "role", "content", "output", "image_url", "source", "uuid", "text", "x"]),
    st.recursive(ODD_VALUES, nest_parts),
)
ODD_MESSAGES = ODD_PARTS | ODD_VALUES | st.lists(ODD_PARTS | ODD_VALUES, max_size=3)


@given(st.sampled_from(PATHS), st.lists(ODD_MESSAGES, max_size=3))
def test_messages_without_items_reach_vllm_as_they_came_or_are_refused(path, messages):
    field = MESSAGE_FORMATS[path].field
    body = {field: messages}
    before = json.dumps(body)
    reader = Messages(get_shared_state(), MESSAGE_FORMATS[path])
    where = field
    try:
        reader.move_items_out(body)
        assert json.dumps(body) == before
        assert reader.moved_items == []
    except InputError as error:
        where = error.where
    assert where.startswith(field)


@pytest.mark.parametrize("path", PATHS)
def test_a_body_without_messages_reaches_vllm_without_them(path):
    body = {"prompt": "a text", "input": ["a text"]}
    expected = dict(body)
    Messages(get_shared_state(), MESSAGE_FORMATS[path]).move_items_out(body)
    assert body == expected


@pytest.mark.parametrize("depth", [200, 450, 900, 2000])
def test_parts_in_parts_are_no_crash(depth):
    content = b'{"type": "tool_result", "content": [' * depth + b"]}" * depth
    body = b'{"messages": [{"role": "user", "content": [%s]}]}' % content
    with serve(ServerLimits()) as client:
        get_state(client).engine.has_tokenizer = True
        answer = client.post("/v1/messages", content=body)
    assert answer.status_code == 200 or "nested at most some hundred deep" in answer.text


def test_a_picture_of_anthropic_is_vllms_part_even_for_a_modality_named_image():
    state = get_shared_state()
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    with mock.patch.object(state, "message_modalities", ["image"]):
        messages = Messages(state, ANTHROPIC)
        messages.move_items_out(body)
    assert messages.moved_items == []
    assert body["messages"][0]["content"][0]["source"] is source
