"""Routes ``POST /v1/mm/generate``: a request goes to the replica that has its items, unless too many tokens wait there.

The outline of a request tells the keys of its items in vLLM's caches and how many tokens it has. Replicas stand on a
ring of hashes (consistent hashing with bounded loads): a new replica takes over a part of the items of each other one.
A request that every replica would refuse is refused here.
"""

from __future__ import annotations

import base64
import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response

from mmkit import InputError
from mmkit.plan.outline import ItemHasher, Outline, inspect_image_file
from mmkit.plan.plan import Plan

PREFIX_TOKENS = 64
"""Requests without items go by so many of their first tokens."""

POINTS = 64
"""Points of each replica on the ring."""

SLACK = 1.25
"""The most tokens that wait at a replica, as a multiple of the mean."""


class Router:
    """Chooses replicas; it has the state of one router.

    Args:
        plan: the spec, bound to the replicas' checkpoint.
        model: what the replicas have after ``--model``.
        replicas: their URLs.
        algorithm: their `mm_hasher_algorithm`.
    """

    def __init__(self, plan: Plan, model: str, replicas: Sequence[str], algorithm: str = "blake3") -> None:
        self.plan = plan
        self.hasher = ItemHasher(algorithm, model)
        self.waiting = dict.fromkeys(replicas, 0)
        self.ring = sorted((find_point(f"{url}#{number}"), url) for url in replicas for number in range(POINTS))

    def outline(self, body: Mapping[str, Any]) -> Outline:
        """Return the outline of a request whose items are pictures as data URLs."""
        data: dict[str, list[Any]] = {}
        for name, items in (body.get("items") or {}).items():
            data[name] = [inspect_image_file(decode_url(item["image_url"]["url"]), name) for item in items]
        return self.plan.outline(
            body["prompt"],
            data,
            options=body.get("mm_processor_kwargs") or {},
            uuids=body.get("uuids") or {},
            cache_salt=body.get("cache_salt"),
            hasher=self.hasher,
        )

    def choose(self, outlined: Outline) -> str:
        """Return the replica of a request: the first on the ring where its tokens are not too many."""
        keys = [key for hashes in outlined.hashes.values() for key in hashes if key]
        key = keys[0] if keys else str(outlined.prompt_token_ids[:PREFIX_TOKENS])
        start = bisect.bisect(self.ring, (find_point(key), ""))
        tokens = len(outlined.prompt_token_ids)
        most = SLACK * (sum(self.waiting.values()) + tokens) / len(self.waiting)
        for _, url in self.ring[start:] + self.ring[:start]:
            if self.waiting[url] == 0 or self.waiting[url] + tokens <= most:
                return url
        return min(self.waiting, key=self.waiting.__getitem__)


def find_point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def decode_url(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2])


def make_app(router: Router, client: httpx.AsyncClient) -> FastAPI:
    """Return the application of a router, which sends requests by a client."""
    app = FastAPI()

    @app.post("/v1/mm/generate")
    async def generate(request: Request) -> Response:
        content = await request.body()
        try:
            outlined = router.outline(json.loads(content))
        except InputError as error:
            return Response(json.dumps({"error": {"message": str(error), "code": 400}}), 400)
        url = router.choose(outlined)
        router.waiting[url] += len(outlined.prompt_token_ids)
        try:
            answer = await client.post(f"{url}/v1/mm/generate", content=content)
        finally:
            router.waiting[url] -= len(outlined.prompt_token_ids)
        return Response(answer.content, answer.status_code, {"x-replica": url})

    return app
