"""Texts, images and precomputed embeddings over HTTP: the LLaVA-like model, against transformers."""

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import numpy as np
import psutil
import pytest
import torch
from PIL import Image as PILImage
from transformers import AutoTokenizer

from examples.llava_like import ARCHITECTURE
from examples.llava_like.cases import draw_picture, make_cases
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.reference import Reference
from mmkit.render_processes import NICENESS
from mmkit.serve import Client, RequestError
from mmkit.serve.process import Server
from mmkit.serve.wire import encode

pytestmark = pytest.mark.timeout(600)

OPTIONS = ("--dtype", "float32", "--block-size", "32", "--enable-mm-embeds", "--served-model-name", "llava",
    "--hf-overrides", f'{{"architectures": ["{ARCHITECTURE}"]}}', "--max-num-seqs", "16",
    "--enforce-eager", "--render-processes", "2")  # fmt: skip
SAMPLING = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
PICTURES = [draw_picture(seed) for seed in range(3)]
QUESTION = "USER: <image>\nwhat is it? ASSISTANT:"
IMAGE, ROWS = 3, 16
"""Id of the placeholder, and how many of them an image becomes."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint):
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    with Server(checkpoint, *OPTIONS, log=tmp_path_factory.mktemp("serve") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with Client(server.url, timeout=240) as client:
        yield client


def answer(reference, ids, images):
    """The greedy answer of transformers to token ids with one placeholder per image."""
    ids = torch.tensor([[token for token in ids for _ in range(ROWS if token == IMAGE else 1)]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if images:
        inputs |= reference.processor.image_processor(images=list(images), return_tensors="pt")
    output = reference.model.generate(**inputs, max_new_tokens=16, min_new_tokens=16, do_sample=False)
    return output[0, ids.shape[1] :].tolist()


def test_texts_and_ids_with_images(client, tokenizer, reference):
    kinds = set()
    for case in make_cases(tokenizer, 12):
        (choice,) = client.generate(case.prompt, {"image": case.images} if case.images else None, **SAMPLING).choices
        ids = tokenizer.encode(case.prompt) if isinstance(case.prompt, str) else case.prompt
        assert choice.token_ids == answer(reference, ids, case.images), case.kind
        kinds.add(case.kind)
    assert len(kinds) > 4


def test_a_dialogue_is_the_prompt_so_far(client, tokenizer, reference):
    """A text after the first is tokenized by itself, without another <s>."""
    first = tokenizer.encode(QUESTION)
    with client.session(QUESTION, {"image": PICTURES[:1]}, **SAMPLING) as session:
        reply = session.first.token_ids
        assert reply == answer(reference, first, PICTURES[:1])
        second = [*first, *reply, *tokenizer.encode(QUESTION, add_special_tokens=False)]
        assert session.next({"image": PICTURES[1:2]}, QUESTION).token_ids == answer(reference, second, PICTURES[:2])


def test_embeddings_computed_before(client, reference):
    """They are the image's, and of the right number of rows."""
    (rows,) = reference.embed(PICTURES[:1])
    (image,) = client.generate(QUESTION, {"image": PICTURES[:1]}, **SAMPLING).choices
    (embeds,) = client.generate(QUESTION, {"image": {"image_embeds": rows[None]}}, **SAMPLING).choices
    assert (embeds.token_ids, embeds.text) == (image.token_ids, image.text)
    with pytest.raises(RequestError, match="llava_like") as caught:
        client.generate(QUESTION, {"image": {"image_embeds": rows[None, :-1]}}, **SAMPLING)
    assert (caught.value.code, caught.value.param) == (400, "items.image[0]")


def test_an_end_of_a_render_process_costs_one_request(server, client, reference, tokenizer):
    """The other requests get their answers, and soon there are as many processes as before."""
    ids = tokenizer.encode(QUESTION)

    def ask(seed):
        picture = draw_picture(seed)
        try:
            (choice,) = client.generate(QUESTION, {"image": [picture]}, **SAMPLING).choices
        except RequestError as error:
            return error.code
        return choice.token_ids == answer(reference, ids, [picture])

    def renderers():
        children = psutil.Process(server.process.pid).children()
        return {child.pid for child in children if child.nice() == NICENESS}

    before = renderers()
    with ThreadPoolExecutor(8) as threads:
        first = list(threads.map(ask, range(100, 104)))
        os.kill(min(before), signal.SIGKILL)
        outcomes = list(threads.map(ask, range(104, 136)))
    assert first == [True] * 4
    assert sorted(outcomes, key=repr) in ([True] * 32, [500, *[True] * 31])
    assert len(before) == len(renderers()) == 2
    assert len(renderers() - before) == 1


ONE = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "one", "schema": ONE}}
TO_THE_END = {**SAMPLING, "max_tokens": 64, "ignore_eos": False}
NO_SPACE = {"logit_bias": {4: -100.0, 5: -100.0}}
"""No line breaks and blanks, of which JSON may have any number."""


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"structured_outputs": {"choice": ["a cat", "a dog"]}}, "a cat|a dog"),
        ({"structured_outputs": {"regex": "[0-9]{3}x"}}, "[0-9]{3}x"),
        ({"structured_outputs": {"grammar": 'root ::= "y" | "no"'}}, "y|no"),
        ({"structured_outputs": {"json": ONE}, **NO_SPACE}, r'\{"a":1\}'),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"response_format": FORMAT, **NO_SPACE}, r'\{"a":1\}'),
    ],
)
def test_what_the_text_must_be(client, options, pattern):
    (choice,) = client.generate(QUESTION, {"image": PICTURES[:1]}, **{**TO_THE_END, **options}).choices
    assert (choice.finish_reason, bool(re.fullmatch(pattern, choice.text))) == ("stop", True), choice.text


def test_a_bias_is_added_to_logits(client, tokenizer):
    """In a session, too; a placeholder is not sampled with it either."""
    (plain,) = client.generate(QUESTION, {"image": PICTURES[:1]}, **SAMPLING).choices
    wanted = tokenizer.convert_tokens_to_ids("W")
    bias = {"logit_bias": {wanted: 100.0}}
    assert set(plain.token_ids) != {wanted}
    (choice,) = client.generate(QUESTION, {"image": PICTURES[:1]}, **bias, **SAMPLING).choices
    assert set(choice.token_ids) == {wanted}
    with client.session(QUESTION, {"image": PICTURES[:1]}, **bias, **SAMPLING) as session:
        assert set(session.first.token_ids) == {wanted}
    (choice,) = client.generate(QUESTION, {"image": PICTURES[:1]}, logit_bias={IMAGE: 100.0}, **SAMPLING).choices
    assert choice.token_ids == plain.token_ids


CONSTRAINED = "structured_outputs: expected a constraint that"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias: expected ids from 0 to 99, got 100."),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: expected ids from 0 to 99, got -1."),
        ({"structured_outputs": {}}, "structured_outputs: expected exactly one of json, regex, "),
        ({"structured_outputs": {"json": "{}", "regex": "a"}}, "structural_tag, got json and regex."),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": FORMAT}, "response_format: expected none beside"),
        ({"structured_outputs": {"regex": "[a"}}, f"{CONSTRAINED} vLLM takes, got Grammar error"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, f"{CONSTRAINED} vLLM takes, got Invalid grammar"),
        ({"structured_outputs": {"choice": []}}, f"{CONSTRAINED} vLLM takes, got Choice"),
        ({"structured_outputs": {"json": "{"}}, f"{CONSTRAINED} vLLM takes, got Invalid JSON"),
        ({"structured_outputs": {"json_object": False}}, f"{CONSTRAINED} vLLM takes"),
        ({"structured_outputs": {"structural_tag": "{}"}}, f"{CONSTRAINED} vLLM takes"),
        ({"structured_outputs": {"regex": r"\p{Greek}+"}}, f"{CONSTRAINED} the model's tokens can follow"),
        ({"structured_outputs": {"choice": ["\u00e9"]}}, f"{CONSTRAINED} the model's tokens can follow"),
    ],
)
def test_constraints_that_are_refused(client, options, sentence):
    """By the routes, by vLLM before the engine, and in it; the answers of others are the same."""
    image = {"image": PICTURES[:1]}
    before = client.generate(QUESTION, image, **SAMPLING).choices
    with pytest.raises(RequestError) as caught:
        client.generate(QUESTION, image, **{**TO_THE_END, **options})
    assert (caught.value.code, caught.value.param) == (400, str(caught.value).split(":")[0])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert client.generate(QUESTION, image, **SAMPLING).choices == before


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,AAAA", "data:image/png;base64,*", "data:,", "file:///etc/passwd"]
)
def test_what_is_no_image(server, url):
    body = {"prompt": QUESTION, "items": {"image": [{"image_url": {"url": url}}]}, **SAMPLING}
    response = httpx.post(f"{server.url}/v1/mm/generate", json=body, timeout=240)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "items.image[0]"


BOMB = PILImage.new("1", (6000, 6000))
"""A few KB, and more pixels than MMKIT_SERVE_PIXELS."""


@pytest.mark.parametrize(
    ("pictures", "code", "sentence"),
    [
        ([BOMB], 413, "MMKIT_SERVE_PIXELS"),
        ([BOMB] * 4, 400, "4 placeholder"),
        ([PICTURES[0]] * 2, 400, "2 placeholder"),
    ],
)
def test_pictures_are_weighed_before_they_are_decoded(client, pictures, code, sentence):
    with pytest.raises(RequestError, match=sentence) as caught:
        client.generate(QUESTION, {"image": pictures}, **SAMPLING)
    assert caught.value.code == code


def test_pictures_in_a_chat_are_weighed_too(server):
    status, body = chat(server, "what is it?", BOMB)
    assert (status, "pixels" in body["error"]["message"]) == (400, True)


def chat(server, text, *pictures, **options):
    """Status and body of a request at vLLM's own chat route, with pictures or parts."""
    images = [
        part if isinstance(part, dict) else {"type": "image_url", **encode({"image": part})["image"][0]}
        for part in pictures
    ]
    message = {"role": "user", "content": [*images, {"type": "text", "text": text}]}
    response = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "llava", "messages": [message], **SAMPLING, **options},
        timeout=240,
    )
    return response.status_code, response.json()


def test_vllms_own_chat_route_runs_the_same_spec(server, tokenizer, reference):
    """A chat message with an image is a prompt of the generated processor; malformed ones do no harm to the next."""
    messages = [{"role": "user", "content": "<image>\nwhat is it?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    for picture in PICTURES[:2]:
        status, body = chat(server, "what is it?", picture)
        assert status == 200, body
        expected = tokenizer.decode(answer(reference, ids, [picture]))
        assert body["choices"][0]["message"]["content"] == expected
        for text, pictures in (("<image> or <image>?", [picture]), ("<image>?", [])):
            status, body = chat(server, text, *pictures)
            assert status == 400, body


def test_a_picture_beside_parts_of_the_spec(server, client, tokenizer, reference):
    """A picture as in any chat, and others in the forms of our own routes; embeddings in all parts or in none."""
    message = {"role": "user", "content": "<image>\n<image>\n<image>\nwhat is it?"}
    prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    pixels = torch.tensor(np.array(PICTURES[2].convert("RGB")))
    own = [{"type": "image", "image": encode({"image": [one]})["image"][0]} for one in (PICTURES[1], pixels)]
    status, body = chat(server, "what is it?", PICTURES[0], *own)
    assert status == 200, body
    expected = tokenizer.decode(answer(reference, ids, PICTURES[:3]))
    assert body["choices"][0]["message"]["content"] == expected
    rows = encode({"rows": [reference.embed([picture])[0] for picture in PICTURES]})["rows"]
    embeds = [{"type": "image", "image": {"image_embeds": one}} for one in rows]
    status, body = chat(server, "what is it?", *embeds)
    assert status == 200, body
    assert body["choices"][0]["message"]["content"] == expected
    for parts, sentence in (
        ([*embeds[:2], own[0]], "image: expected image_embeds in all parts, with the same fields, got others as well."),
        ([{"type": "image", "image": {"image_url": 1}}], "items.image[0].image_url: expected an object, got"),
    ):
        status, body = chat(server, "what is it?", *parts)
        assert (status, sentence in body["error"]["message"]) == (400, True), body


@pytest.fixture
def fetched():
    """The address of a server beside this one, and the paths that it was asked for."""
    paths = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/x", paths
    server.shutdown()
    thread.join()
    server.server_close()


def test_urls_in_a_chat_are_not_fetched(server, fetched):
    """Nor files read; `test_what_is_no_image` has those of our own route."""
    url, paths = fetched
    for odd in (url, "file:///etc/hostname", url.upper(), "ftp://127.0.0.1/x"):
        part = {"type": "image_url", "image_url": {"url": odd}}
        status, refusal = chat(server, "what is it?", part)
        assert (status, "expected a URL that starts with data:" in refusal["error"]["message"]) == (400, True)
    assert not paths


def test_names_of_other_tenants(server, client):
    """Whatever the route, an item without data is one that the same tenant has named."""
    (part,) = encode({"image": PICTURES[:1]})["image"]
    salts = {"cache_salt": "alice"}

    def absent(uuid):
        return {"type": "image_url", "image_url": None, "uuid": uuid}

    status, named = chat(server, "what is it?", {"type": "image_url", **part, "uuid": "x"}, **salts)
    assert status == 200
    client.generate(QUESTION, {"image": PICTURES[:1]}, uuids={"image": ["y"]}, **salts, **SAMPLING)
    assert chat(server, "what is it?", absent("x"), **salts)[1]["choices"] == named["choices"]
    client.generate(QUESTION, {"image": [None]}, uuids={"image": ["y"]}, **salts, **SAMPLING)
    for uuid in ("x", "y"):
        for other in ({}, {"cache_salt": "bob"}):
            assert chat(server, "what is it?", absent(uuid), **other)[0] == 400
            with pytest.raises(RequestError, match="no such item"):
                client.generate(QUESTION, {"image": [None]}, uuids={"image": [uuid]}, **other, **SAMPLING)
