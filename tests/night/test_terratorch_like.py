"""A model of raw input without a prompt: several requests at once, and over HTTP."""

import re

import httpx
import pytest
import torch
from vllm import LLM

from examples.server import Server
from examples.terratorch_like.checkpoint import make_checkpoint
from mmkit.serve import Client, RequestError, content_part

pytestmark = pytest.mark.timeout(600)

FLOAT = ("--dtype", "float32", "--enforce-eager")


def make_images(count: int) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(1)
    images = []
    for _ in range(count):
        pixels = torch.randn(6, 32, 32, generator=rng)
        location = torch.randn(2, generator=rng)
        images.append({"pixel_values": pixels, "location_coords": location})
    return images


IMAGES = make_images(5)
PLACES = r"(terratorch_like\.image|messages\[0\]\.content\[1\]\.image)"
TOO_MANY = rf"{PLACES}: .* At most 1 image\(s\) may be provided in one prompt\."
MISSING = r"(terratorch_like\.image|messages): expected one item per request, got none\."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("terratorch"))


@pytest.fixture(scope="module")
def ask(checkpoint, engines):
    """A function that sends several requests at once, and returns the tensor of each."""
    options = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4}
    llm = LLM(str(checkpoint), runner="pooling", skip_tokenizer_init=True, **options)
    engines.callback(llm.llm_engine.engine_core.shutdown)

    def encode(requests):
        results = llm.encode(requests, pooling_task="plugin", use_tqdm=False)
        return [result.outputs.data for result in results]

    return encode


def make_request(image, prompt=(1,)):
    return {"prompt_token_ids": list(prompt), "multi_modal_data": {"image": image}}


def test_requests_together_give_the_tensors_of_each_alone_whatever_their_prompts(ask):
    """A batch may add up in another order on some machines, so the tensors are equal only to rounding."""
    alone = []
    for image in IMAGES:
        alone += ask([make_request(image)])
    assert len({tensor.sum().item() for tensor in alone}) == len(IMAGES)

    together = ask([make_request(image, [1] * number) for number, image in enumerate(IMAGES)])

    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_a_server_gives_the_tensors_of_the_engine_and_refuses_other_numbers_of_images(ask, checkpoint, tmp_path):
    options = ("--runner", "pooling", "--skip-tokenizer-init", "--tokenizer-mode", "terratorch", *FLOAT)
    modules = {"MMKIT_MODULES": "examples.terratorch_like.model"}
    log = tmp_path / "log"
    with (
        Server(checkpoint, *options, environment=modules, log=log) as server,
        Client(server.url, timeout=240) as client,
    ):
        (modality,) = client.modalities().modalities
        assert modality.name == "image"
        assert modality.limit == 1
        assert modality.largest_tokens == 0
        assert modality.placeholder == []

        def pool(images, **options):
            parts = [content_part("image", image, **options) for image in images]
            body = {"messages": [{"role": "user", "content": parts}]}
            return httpx.post(f"{server.url}/pooling", json=body, timeout=240)

        for image in IMAGES:
            (expected,) = ask([make_request(image)])
            for as_url in (False, True):
                (pooled,) = pool([image], as_url=as_url).json()["data"]
                assert torch.allclose(torch.tensor(pooled["data"]), expected, atol=1e-4)

        for images, sentence in ((IMAGES[:2], TOO_MANY), ([], MISSING)):
            answer = pool(images)
            assert answer.status_code == 400
            assert re.match(sentence, answer.json()["error"]["message"])
        with pytest.raises(RequestError, match="does not support generation") as refusal:
            client.generate([1], {"image": IMAGES[:1]})
        assert refusal.value.code == 400
