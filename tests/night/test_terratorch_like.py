"""A model of raw input without a prompt: two requests at once, and over HTTP."""

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
RANDOM = torch.Generator().manual_seed(1)
IMAGES = [
    {"pixel_values": torch.randn(6, 32, 32, generator=RANDOM), "location_coords": torch.randn(2, generator=RANDOM)}
    for _ in range(5)
]
PLACES = r"(terratorch_like\.image|messages\[0\]\.content\[1\]\.image)"
TOO_MANY = rf"{PLACES}: .* At most 1 image\(s\) may be provided in one prompt\."
MISSING = r"(terratorch_like\.image|messages): expected one item per request, got none\."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("terratorch"))


@pytest.fixture(scope="module")
def ask(checkpoint, engines):
    """Gives a function of several requests at once."""
    options = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4}
    llm = LLM(str(checkpoint), runner="pooling", skip_tokenizer_init=True, **options)
    engines.callback(llm.llm_engine.engine_core.shutdown)
    return lambda requests: [
        result.outputs.data for result in llm.encode(requests, pooling_task="plugin", use_tqdm=False)
    ]


def request(image, prompt=(1,)):
    return {"prompt_token_ids": list(prompt), "multi_modal_data": {"image": image}}


def test_together_as_alone(ask):
    """Whatever the prompts are. The sums of a batch may have another order on some machines."""
    alone = [ask([request(image)])[0] for image in IMAGES]
    assert len({one.sum().item() for one in alone}) == len(IMAGES)
    together = ask([request(image, [1] * i) for i, image in enumerate(IMAGES)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_over_http(ask, checkpoint, tmp_path):
    options = ("--runner", "pooling", "--skip-tokenizer-init", "--tokenizer-mode", "terratorch", *FLOAT)
    modules = {"MMKIT_MODULES": "examples.terratorch_like.model"}
    log = tmp_path / "log"
    with (
        Server(checkpoint, *options, environment=modules, log=log) as server,
        Client(server.url, timeout=240) as client,
    ):
        (told,) = client.modalities().modalities
        assert (told.name, told.limit, told.largest_tokens, told.placeholder) == ("image", 1, 0, [])

        def pool(images, **options):
            parts = [content_part("image", image, **options) for image in images]
            body = {"messages": [{"role": "user", "content": parts}]}
            return httpx.post(f"{server.url}/pooling", json=body, timeout=240)

        for image in IMAGES:
            (wanted,) = ask([request(image)])
            for as_url in (False, True):
                (pooled,) = pool([image], as_url=as_url).json()["data"]
                assert torch.allclose(torch.tensor(pooled["data"]), wanted, atol=1e-4)
        for images, sentence in ((IMAGES[:2], TOO_MANY), ([], MISSING)):
            refused = pool(images)
            assert refused.status_code == 400
            assert re.match(sentence, refused.json()["error"]["message"])
        with pytest.raises(RequestError, match="does not support generation") as refusal:
            client.generate([1], {"image": IMAGES[:1]})
        assert refusal.value.code == 400
