"""Texts, images and precomputed embeddings over HTTP: the LLaVA-like model, against the engine in this process."""

import httpx
import pytest
from transformers import AutoTokenizer

from examples.llava_like import ARCHITECTURE
from examples.llava_like.cases import draw_picture, make_cases
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.offline import answer, engine
from mmkit.serve import Client, RequestError
from mmkit.serve.process import Server
from mmkit.serve.wire import encode

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

OPTIONS = ("--dtype", "float32", "--block-size", "32", "--enable-mm-embeds", "--served-model-name", "llava",
    "--hf-overrides", f'{{"architectures": ["{ARCHITECTURE}"]}}', "--max-num-seqs", "16")  # fmt: skip
SAMPLING = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
PICTURES = [draw_picture(seed) for seed in range(3)]
QUESTION = "USER: <image>\nwhat is it? ASSISTANT:"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def cases(checkpoint):
    """Texts and token ids with no, one and several images."""
    return make_cases(AutoTokenizer.from_pretrained(checkpoint), 12)


@pytest.fixture(scope="module")
def offline(checkpoint, cases):
    """The greedy answers of the engine in this process to the cases, and to a dialogue of two turns."""
    with engine(checkpoint) as llm:
        answers = answer(llm, [case.request() for case in cases])
        tokenizer = llm.get_tokenizer()
        first = {"prompt": QUESTION, "multi_modal_data": {"image": PICTURES[0]}}
        (said,) = answer(llm, [first])
        second = tokenizer.encode(QUESTION, add_special_tokens=False)
        ids = [*tokenizer.encode(QUESTION), *said, *second]
        (then,) = answer(llm, [{"prompt_token_ids": ids, "multi_modal_data": {"image": PICTURES[:2]}}])
    return answers, [said, then]


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    with Server(checkpoint, *OPTIONS, log=tmp_path_factory.mktemp("serve") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with Client(server.url) as client:
        yield client


def test_texts_and_ids_with_images(client, cases, offline):
    kinds = set()
    for case, ids in zip(cases, offline[0], strict=True):
        (made,) = client.generate(case.prompt, {"image": case.images} if case.images else None, **SAMPLING).choices
        assert made.token_ids == ids, case.kind
        kinds.add(case.kind.rpartition(", ")[::2])
    assert len(kinds) > 4


def test_a_dialogue_is_the_prompt_so_far(client, offline):
    """A text after the first is tokenized by itself, without another <s>."""
    first, second = offline[1]
    with client.session(QUESTION, {"image": PICTURES[:1]}, **SAMPLING) as session:
        assert session.first.token_ids == first
        assert session.next({"image": PICTURES[1:2]}, QUESTION).token_ids == second


def test_embeddings_computed_before(client, checkpoint):
    """They are the image's, and of the right number of rows."""
    from examples.llava_like.reference import Reference

    (rows,) = Reference(checkpoint).embed(PICTURES[:1])
    (image,) = client.generate(QUESTION, {"image": PICTURES[:1]}, **SAMPLING).choices
    (embeds,) = client.generate(QUESTION, {"image": {"image_embeds": rows[None]}}, **SAMPLING).choices
    assert (embeds.token_ids, embeds.text) == (image.token_ids, image.text)
    with pytest.raises(RequestError, match="llava_like") as caught:
        client.generate(QUESTION, {"image": {"image_embeds": rows[None, :-1]}}, **SAMPLING)
    assert (caught.value.code, caught.value.param) == (400, "items.image[0]")


def test_what_is_no_image(server):
    body = {"prompt": QUESTION, **SAMPLING}
    for url in ("data:image/png;base64,AAAA", "data:image/png;base64,*", "data:,", "file:///etc/passwd"):
        sent = {**body, "items": {"image": [{"image_url": {"url": url}}]}}
        answer = httpx.post(f"{server.url}/v1/mm/generate", json=sent, timeout=60)
        assert answer.status_code == 400, url
        assert answer.json()["error"]["param"] == "items.image[0]"


def test_vllms_own_chat_route_runs_the_same_spec(server, client, checkpoint):
    """A chat message with an image is a prompt of the generated processor."""
    (part,) = encode({"image": PICTURES[0]})["image"]
    message = {"role": "user", "content": [{"type": "image_url", **part}, {"type": "text", "text": "what is it?"}]}
    body = {"model": "llava", "messages": [message], "max_tokens": 16, "temperature": 0.0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    said = [{"role": "user", "content": "<image>\nwhat is it?"}]
    prompt = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    (made,) = client.generate(tokenizer.encode(prompt, add_special_tokens=False), {"image": PICTURES[:1]},
        max_tokens=16, temperature=0.0).choices  # fmt: skip
    assert answer["choices"][0]["message"]["content"] == made.text
