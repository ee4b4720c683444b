"""A model of raw input without a prompt: two requests at once, and over HTTP."""

import pytest
import torch
from vllm import LLM

from examples.terratorch_like.checkpoint import make_checkpoint
from mmkit.serve import Client, RequestError
from mmkit.serve.process import Server

pytestmark = pytest.mark.timeout(600)

RANDOM = torch.Generator().manual_seed(1)
IMAGES = [
    {"pixel_values": torch.randn(6, 32, 32, generator=RANDOM), "location_coords": torch.randn(2, generator=RANDOM)}
    for _ in range(5)
]
TOO_MANY = r"terratorch_like\.image: .* At most 1 image\(s\) may be provided in one prompt\."
MISSING = r"terratorch_like\.image: expected one item per request, got none\."


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
    options = ("--runner", "pooling", "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager")
    modules = {"MMKIT_MODULES": "examples.terratorch_like.model"}
    log = tmp_path / "log"
    with (
        Server(checkpoint, *options, environment=modules, log=log) as server,
        Client(server.url, timeout=240) as client,
    ):
        (told,) = client.modalities().modalities
        assert (told.name, told.limit, told.largest_tokens, told.placeholder) == ("image", 1, 0, [])
        for image in IMAGES:
            (wanted,) = ask([request(image)])
            for prompt in (None, [1]):
                pooled = client.pool(prompt, {"image": [image]})
                assert torch.allclose(torch.from_numpy(pooled.array().copy()), wanted, atol=1e-4)
        for items, sentence in (({"image": IMAGES[:2]}, TOO_MANY), ({}, MISSING)):
            with pytest.raises(RequestError, match=sentence) as refused:
                client.pool(None, items)
            assert (refused.value.code, refused.value.param) == (400, "items.image")
        with pytest.raises(RequestError, match="model: expected one that generates, got a pooling model"):
            client.generate([1], {"image": IMAGES[:1]})
        with pytest.raises(RequestError, match="task: expected one of plugin, got 'embed'"):
            client.pool(None, {"image": IMAGES[:1]}, task="embed")
