"""Texts, images and precomputed embeddings over HTTP: the LLaVA-like model, against transformers."""

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from examples.llava_like import ARCHITECTURE
from examples.llava_like.cases import draw_picture, make_cases
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.reference import Reference
from mmkit.serve import Client, RequestError
from mmkit.serve.process import Server
from mmkit.serve.wire import encode

pytestmark = pytest.mark.timeout(600)

OPTIONS = ("--dtype", "float32", "--block-size", "32", "--enable-mm-embeds", "--served-model-name", "llava",
    "--hf-overrides", f'{{"architectures": ["{ARCHITECTURE}"]}}', "--max-num-seqs", "16")  # fmt: skip
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


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,AAAA", "data:image/png;base64,*", "data:,", "file:///etc/passwd"]
)
def test_what_is_no_image(server, url):
    body = {"prompt": QUESTION, "items": {"image": [{"image_url": {"url": url}}]}, **SAMPLING}
    response = httpx.post(f"{server.url}/v1/mm/generate", json=body, timeout=240)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "items.image[0]"


def chat(server, text, *pictures):
    """Status and body of a request at vLLM's own chat route."""
    images = [{"type": "image_url", **encode({"image": picture})["image"][0]} for picture in pictures]
    message = {"role": "user", "content": [*images, {"type": "text", "text": text}]}
    response = httpx.post(
        f"{server.url}/v1/chat/completions", json={"model": "llava", "messages": [message], **SAMPLING}, timeout=240
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
        wanted = tokenizer.decode(answer(reference, ids, [picture]))
        assert body["choices"][0]["message"]["content"] == wanted
        for text, pictures in (("<image> or <image>?", [picture]), ("<image>?", [])):
            status, body = chat(server, text, *pictures)
            assert status == 400, body
