"""The router of examples/router, with two replicas in its process in place of servers."""

from __future__ import annotations

import asyncio
import base64
import io
import subprocess
import sys
from collections import Counter
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image as PILImage

from examples.gallery.llava_next import LLAVA_NEXT
from examples.router.app import SLACK, Router, make_app
from examples.router.checkpoint import bind_to_files
from tests import ROOT

FOLDER = ROOT / "tests" / "data" / "oracles" / "llava_next" / "checkpoint"
REPLICAS = ["http://first", "http://second"]
PLAN = bind_to_files(LLAVA_NEXT, FOLDER)
TARGET = PLAN.environment.scope.cfg.image_token_index


class Replicas(httpx.AsyncBaseTransport):
    """Two applications that count their requests, and answer when they may."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.transports = {}
        for url in REPLICAS:
            self.transports[httpx.URL(url).host] = httpx.ASGITransport(self.make_replica(url))

    def make_replica(self, url: str) -> FastAPI:
        replica = FastAPI()

        @replica.post("/v1/mm/generate")
        async def generate() -> dict[str, str]:
            self.counts[url] += 1
            await self.may_answer.wait()
            return {"text": url}

        return replica

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self.transports[request.url.host].handle_async_request(request)


def make_url(seed: int, width: int = 90, height: int = 60) -> str:
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    PILImage.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def make_body(seed: int, words: list[int] | None = None) -> dict[str, Any]:
    picture = {"type": "image_url", "image_url": {"url": make_url(seed)}}
    return {"prompt": [*(words or []), TARGET, 20], "items": {"image": [picture]}}


def make_router() -> Router:
    # the name is hashed: with the path of a checkout, pictures would go elsewhere on each machine
    return Router(PLAN, "llava-next", REPLICAS)


async def post_all(router: Router, replicas: Replicas, bodies: list[Any], in_flight: bool = False) -> list[Any]:
    """Post requests one after the other, or all at once, answered when all have arrived."""
    async with httpx.AsyncClient(transport=replicas) as client:
        app = make_app(router, client)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as caller:
            if not in_flight:
                return [await caller.post("/v1/mm/generate", json=body) for body in bodies]
            replicas.may_answer.clear()
            tasks = [asyncio.create_task(caller.post("/v1/mm/generate", json=body)) for body in bodies]
            while sum(replicas.counts.values()) < len(bodies):
                await asyncio.sleep(0.001)
            replicas.may_answer.set()
            return list(await asyncio.gather(*tasks))


def test_the_requests_of_a_picture_go_to_one_replica() -> None:
    bodies = [make_body(seed, words) for seed in range(12) for words in ([], [30, 31], [40])]
    answers = asyncio.run(post_all(make_router(), Replicas(), bodies))
    urls = [answer.headers["x-replica"] for answer in answers]
    assert [answer.json()["text"] for answer in answers] == urls
    for first in range(0, len(urls), 3):
        assert len(set(urls[first : first + 3])) == 1
    assert set(urls) == set(REPLICAS)


def test_requests_without_items_go_by_their_prefix() -> None:
    router = make_router()
    for number in range(10, 20):
        prefix = [number] * 64
        chosen = {router.choose(router.outline({"prompt": [*prefix, ending]})) for ending in (20, 21, 22)}
        assert len(chosen) == 1


def test_no_replica_waits_for_many_more_tokens_than_the_other() -> None:
    router = make_router()
    replicas = Replicas()
    bodies = [make_body(3)] * 9
    (home,) = {answer.headers["x-replica"] for answer in asyncio.run(post_all(router, replicas, bodies[:2]))}
    replicas.counts.clear()
    asyncio.run(post_all(router, replicas, bodies, in_flight=True))
    (other,) = set(REPLICAS) - {home}
    assert replicas.counts[home] >= replicas.counts[other] > 0, "the bound has moved some requests"
    assert replicas.counts[home] <= SLACK * len(bodies) / 2 + 1
    assert set(router.waiting.values()) == {0}
    (answer,) = asyncio.run(post_all(router, replicas, bodies[:1]))
    assert answer.headers["x-replica"] == home, "and they come back"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"prompt": [20], "items": make_body(0)["items"]},
            "llava_next.image: expected 1 target '<image>' in the prompt",
        ),
        ({"prompt": [TARGET], "items": {"image": [{"image_url": {"url": "data:,"}}]}}, "image: expected an image file"),
        ({"prompt": [10**6]}, "llava_next.prompt[0]: expected a token id"),
    ],
    ids=["no target", "no picture", "no token"],
)
def test_what_a_replica_would_refuse_reaches_none(body: dict[str, Any], message: str) -> None:
    replicas = Replicas()
    (answer,) = asyncio.run(post_all(make_router(), replicas, [body]))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert not replicas.counts


IMPORTED = f"""
import sys
from pathlib import Path
from examples.gallery.llava_next import LLAVA_NEXT
from examples.router.app import Router
from examples.router.checkpoint import bind_to_files
router = Router(bind_to_files(LLAVA_NEXT, Path({str(FOLDER)!r})), "m", ["http://first"])
print(len(router.outline({{"prompt": "a"}}).prompt_token_ids) > 0)
print(sorted({{"vllm", "transformers"}} & {{name.partition(".")[0] for name in sys.modules}}))
"""


def test_the_router_imports_neither_vllm_nor_transformers() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "True\n[]\n", result.stderr
