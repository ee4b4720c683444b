"""vLLM's own benchmarks with requests that are drawn from Terra's spec."""

import pytest

from benchmarks.vllm_bench import requests
from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit.testing import of_spec
from tests.engine.processes import run
from tests.night.malformed import KEY

pytestmark = pytest.mark.timeout(600)

BENCH, MODEL = ("-m", "benchmarks.vllm_bench"), ("--model", str(CHECKPOINT), "--skip-tokenizer-init")
FEW = ("--num-prompts", "5", "--output-len", "3")


def test_serve_sends_items_of_any_modality(server):
    port = server.url.rpartition(":")[2]
    options = ("--host", "127.0.0.1", "--port", port)
    printed = run(*BENCH, "serve", *MODEL, *options, *FEW, MMKIT_MODULES="examples.terra.model", OPENAI_API_KEY=KEY)
    counted = [line.split() for line in printed.splitlines() if " requests:" in line]
    assert [*counted[0], *counted[1]] == ["Successful", "requests:", "5", "Failed", "requests:", "0"]


def test_a_seed_draws_the_same_requests():
    subject = of_spec(TERRA, CHECKPOINT)
    first, again, other = (list(map(repr, requests(subject, 8, seed, 500))) for seed in (1, 1, 2))
    assert first == again != other
    assert len({*first}) > 4
