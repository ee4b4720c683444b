"""Pictures in vLLM's own chat: the answers of the engine, and what is refused before it."""

import io
import json
import re
import select
import socket
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from examples.llava_like.cases import Case, draw_picture
from examples.llava_like.offline import answer
from examples.llava_like.reference import Reference
from examples.server import Server
from mmkit.serve import Client, RequestError
from mmkit.wire.items import ITEM_DATA_URL, encode
from tests.engine.llava_like.bodies import (
    BOMB,
    HALF_A_BOMB,
    PICTURES,
    SAMPLING,
    TIMEOUT,
    Answer,
    ask_chat,
    ask_generate,
    encode_pictures,
    generate_ids,
    make_gateway_part,
    make_item,
    make_item_parts,
    make_jpeg_part,
    make_url_parts,
    refer_to,
    save_jpeg,
    save_tensor,
)

pytestmark = pytest.mark.timeout(600)


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answer_by_engine(llava: Any, tokenizer: Any) -> Any:
    """A function that returns the answer of the engine to a chat with pictures."""

    def answer_chat(*pictures: Any) -> Answer:
        message = {"role": "user", "content": "<image>\n" * len(pictures) + "what is it?"}
        prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        (generated,) = answer(llava, [Case(ids, pictures).request()])
        return Answer(200, tokenizer.decode(generated))

    return answer_chat


@pytest.fixture(scope="module")
def rows(reference: Reference) -> list[Any]:
    """The embeddings of each picture, (num_positions, hidden_size)."""
    return [reference.embed([picture])[0] for picture in PICTURES]


def test_a_picture_as_in_any_chat(server: Server, answer_by_engine: Any) -> None:
    assert ask_chat(server, make_url_parts(PICTURES[0])) == answer_by_engine(PICTURES[0])


def test_pictures_in_the_forms_of_mmkits_own_routes(server: Server, answer_by_engine: Any) -> None:
    pixels = torch.tensor(np.array(PICTURES[2].convert("RGB")))
    parts = make_url_parts(PICTURES[0]) + make_item_parts(PICTURES[1], pixels)
    assert ask_chat(server, parts) == answer_by_engine(*PICTURES)


def test_pictures_through_a_gateway(server: Server, answer_by_engine: Any) -> None:
    first, second, third = PICTURES
    parts = [make_gateway_part(first), *make_item_parts(second), make_gateway_part(third)]
    assert ask_chat(server, parts) == answer_by_engine(*PICTURES)


def test_jpeg_files_that_render_processes_decode(server: Server, answer_by_engine: Any) -> None:
    """The engine of the answers has no such processes. At the second request the processor cache has the pictures."""
    files = [save_jpeg(picture) for picture in PICTURES]
    expected = answer_by_engine(*[Image.open(io.BytesIO(file)) for file in files])
    for _ in range(2):
        assert ask_chat(server, [make_jpeg_part(file) for file in files]) == expected


def test_a_damaged_jpeg_file_is_refused_by_the_render_process_that_decodes_it(server: Server) -> None:
    """vLLM's loader, which would decode it in the server, is not asked."""
    file = save_jpeg(PICTURES[0])
    beginning_of_pixels = file.index(b"\xff\xda")
    refusal = ask_chat(server, [make_jpeg_part(file[:beginning_of_pixels] + file[-2:])])
    assert refusal.status == 400
    assert "expected an image that can be read, got OSError" in refusal.text


def test_a_render_process_that_dies_is_a_fault_of_the_server(server: Server, answer_by_engine: Any) -> None:
    """At vLLM's route, too. Each of the two costs a request; then there are others."""
    head = psutil.Process(server.process.pid)
    parts = [make_jpeg_part(save_jpeg(draw_picture(77)))]
    for child in head.children():
        if child.nice() > head.nice():
            child.kill()
    first, second, third = [ask_chat(server, parts) for _ in range(3)]
    sentence = "server: expected to serve the request, got an error of its own. Its log says which."
    assert first == Answer(500, sentence)
    assert second == first or second.status == 200
    assert third.status == 200
    assert ask_chat(server, make_url_parts(PICTURES[0])) == answer_by_engine(PICTURES[0])


def make_embeds_parts(rows: list[Any]) -> list[Any]:
    return [make_item({"image_embeds": encoded}) for encoded in encode({"rows": rows})["rows"]]


def test_embeddings_stand_for_their_pictures(server: Server, answer_by_engine: Any, rows: list[Any]) -> None:
    assert ask_chat(server, make_embeds_parts(rows)) == answer_by_engine(*PICTURES)


def test_embeddings_in_vllms_own_parts(server: Server, answer_by_engine: Any, rows: list[Any]) -> None:
    parts = [{"type": "image_embeds", "image_embeds": save_tensor(picture_rows)} for picture_rows in rows]
    assert ask_chat(server, parts) == answer_by_engine(*PICTURES)


def test_embeddings_beside_pictures_are_refused(server: Server, answer_by_engine: Any, rows: list[Any]) -> None:
    refusal = ask_chat(server, make_embeds_parts(rows[:2]) + make_item_parts(PICTURES[1]))
    assert refusal.status == 400
    assert refusal.text == "messages: expected image_embeds in all parts, with the same fields, got others as well."
    assert ask_chat(server, make_url_parts(PICTURES[0])) == answer_by_engine(PICTURES[0])


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "status", "words"),
    [
        ([refer_to("data:image/png;base64,AAAA")], 400, "items.image[0]"),
        ([refer_to("file:///etc/passwd")], 400, "items.image[0]"),
        (encode_pictures(BOMB), 413, "MMKIT_SERVE_PIXELS"),
        (encode_pictures(*[HALF_A_BOMB] * 4), 413, "MMKIT_SERVE_PIXELS"),  # more than there are placeholders
        (encode_pictures(*PICTURES[:2]), 400, "2 targets"),
    ],
    ids=["no picture", "a file", "a bomb", "four halves", "two pictures"],
)
def test_what_mmkits_own_route_refuses(server: Server, images: list[Any], status: int, words: str) -> None:
    """Pixels are counted before pictures are decoded."""
    refusal = ask_generate(server, images)
    assert refusal.status == status, refusal
    assert words in refusal.text


PIXELS = "expected at most 33554432 pixels in one"


@pytest.mark.parametrize(
    ("parts", "status", "words"),
    [
        (make_url_parts(BOMB), 413, f"messages[0].content[0]: {PIXELS} request, got more."),
        (make_url_parts(HALF_A_BOMB, HALF_A_BOMB), 413, f"messages[0].content[1]: {PIXELS} request"),
        (make_item_parts(HALF_A_BOMB, HALF_A_BOMB), 413, f"messages[0].content[1].image: {PIXELS}"),
        ([make_item({"image_url": 1})], 400, "content[0].image.image_url: expected object, got"),
        (
            [refer_to(f"{ITEM_DATA_URL}image;base64,*")],
            400,
            "messages[0].content[0]: expected base64 in the URL of an item, got an",
        ),
        (
            [refer_to(f"{ITEM_DATA_URL}video;base64,AAAA")],
            400,
            "content[0]: expected one of image as the modality of a URL, got 'v",
        ),
    ],
    ids=["a bomb", "two halves", "two halves as items", "no URL", "no base64", "another modality"],
)
def test_what_a_chat_refuses(server: Server, parts: list[Any], status: int, words: str) -> None:
    """Pixels are counted before pictures are decoded."""
    refusal = ask_chat(server, parts)
    assert refusal.status == status, refusal
    assert words in refusal.text


@pytest.mark.parametrize("pictures", [PICTURES[:1], []], ids=["a picture", "no picture"])
def test_a_placeholder_without_a_picture_is_refused(server: Server, pictures: list[Any]) -> None:
    refusal = ask_chat(server, make_url_parts(*pictures), text="<image> or <image>?")
    assert refusal.status == 400
    assert "placeholder" in refusal.text


def test_urls_in_a_chat_are_not_fetched(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        for refused_url in (url, url.upper(), "ftp://127.0.0.1/x"):
            assert ask_chat(server, [refer_to(refused_url)]).status == 400
        readable, _, _ = select.select([listener], [], [], 0)
        assert not readable, "the server has connected"


def test_files_in_a_chat_are_not_read(server: Server) -> None:
    refusal = ask_chat(server, [refer_to("file:///etc/hostname")])
    assert refusal.status == 500  # vLLM's status


# -- items of others ---------------------------------------------------------------------------------------------------


def make_http_request(parts: list[Any], *headers: str) -> bytes:
    """Return the bytes of a request at the chat route."""
    body = json.dumps({"model": "llava", "messages": [{"role": "user", "content": parts}], **SAMPLING})
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", body]).encode()


def receive_all(connection: socket.socket) -> bytes:
    received = b""
    while True:
        data = connection.recv(2**16)
        if not data:
            return received
        received += data


def test_an_item_of_the_request_before_is_none_of_this_one(server: Server) -> None:
    """Both come in one segment, and the server begins the second in the context of the first."""
    first = make_http_request(make_item_parts(PICTURES[0]))
    second = make_http_request([refer_to("mmkit-item:0")], "Connection: close")
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as connection:
        connection.sendall(first + second)
        answers = receive_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"400"], answers


def ask_by_name(server: Server, uuid: str, **options: Any) -> Answer:
    """Return the answer of a chat to a picture that only has a name."""
    return ask_chat(server, [{"type": "image_url", "image_url": None, "uuid": uuid}], **options)


ALICE: dict[str, Any] = {"cache_salt": "alice"}
OTHER_TENANTS: list[dict[str, Any]] = [{}, {"cache_salt": "bob"}]


def test_a_tenant_names_a_picture_of_a_chat_again(server: Server) -> None:
    (part,) = make_url_parts(PICTURES[0])
    first = ask_chat(server, [{**part, "uuid": "x"}], **ALICE)
    assert first.status == 200
    assert ask_by_name(server, "x", **ALICE) == first


def test_a_tenant_names_a_picture_of_mmkits_own_route_again(client: Client) -> None:
    uuids = {"image": ["y"]}
    first = generate_ids(client, uuids=uuids, **ALICE)
    assert generate_ids(client, {"image": [None]}, uuids=uuids, **ALICE) == first


@pytest.mark.parametrize("tenant", OTHER_TENANTS, ids=["no salt", "bob"])
@pytest.mark.parametrize("uuid", ["x", "y"])
def test_the_names_of_another_tenant_are_none_of_this_one(
    server: Server, client: Client, tenant: dict[str, Any], uuid: str
) -> None:
    """Whatever the route at which the other one named it."""
    (part,) = make_url_parts(PICTURES[0])
    assert ask_chat(server, [{**part, "uuid": uuid}], **ALICE).status == 200
    assert ask_by_name(server, uuid, **tenant).status == 400
    with pytest.raises(RequestError, match="no such item"):
        generate_ids(client, {"image": [None]}, uuids={"image": [uuid]}, **tenant)
