"""A server under a bound of memory, refusals that want more of it, and requests drawn from the published schema."""

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from mmkit.serve.process import Server
from tests.night.malformed import ACTIONS, GREEDY, HEADERS, KEY, PAD, SAMPLING, prompt_of
from tests.night.soak import metrics
from tests.night.weights import MIB, Watch, measure, serving

pytestmark = pytest.mark.timeout(3000)

ROOM = 512 * MIB
"""Address space that the front process may take beside what it has once it serves; the refusals of before took more."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("weights")) as server:
        assert server.process is not None
        most = Watch(server).memory("VmSize") + ROOM
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (most, most))
        yield server


def test_a_refusal_costs_little_more_than_what_was_sent(server: Server) -> None:
    assert [row for row in measure(server) if not row["held"]] == []


UNREAD = httpx.HTTPTransport(
    limits=httpx.Limits(max_connections=None), socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
)
"""Its sockets hold little, so that an answer of some 200 KB waits in the server."""


def test_streams_that_nobody_reads(server: Server) -> None:
    body = {"prompt": [1], "stream": True, "sampling_params": {"max_tokens": 256, "logprobs": 20, **GREEDY}}
    watch = Watch(server)
    with httpx.Client(timeout=600, transport=UNREAD, headers=HEADERS) as client:

        def hundred() -> int:
            """Memory when all of them have been generated, and none was read."""
            with ExitStack() as stack:
                streams = [client.stream("POST", f"{server.url}/v1/mm/generate", json=body) for _ in range(100)]
                assert {stack.enter_context(stream).status_code for stream in streams} == {200}
                while "vllm:num_requests_running" in (text := client.get(f"{server.url}/metrics").text):
                    gauges = metrics(text)
                    if gauges["vllm:num_requests_running"] + gauges["vllm:num_requests_waiting"] == 0:
                        break
                    time.sleep(0.5)
                return watch.memory("VmRSS")

        first, *others = [hundred() for _ in range(3)]
    print(f"MiB with 100 unread streams: {[size / MIB for size in (first, *others)]}")
    assert max(others) - first < 20 * MIB


def narrowed(body: dict[str, Any]) -> dict[str, Any]:
    """The published schema of a request, with what only the model knows: most of what is drawn of it is answered."""
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": PAD - 1}, "minItems": 1}
    few = {"type": "integer", "minimum": 1, "maximum": 4}
    nothing = {"type": "null"}
    sampling = {name: of for name, of in SAMPLING.items() if name not in ("stop", "structured_outputs")}
    sampling |= {"max_tokens": few, "n": few, "logprobs": few, "min_tokens": {"enum": [0, 1]}}
    sampling |= {"stop_token_ids": ids, "allowed_token_ids": ids, "logit_bias": nothing}
    bounds = {"model": {"enum": ["terra"]}, "mm_processor_kwargs": nothing, "output": nothing}
    bounds["sampling_params"] = {
        "type": "object", "properties": sampling, "required": ["max_tokens"], "additionalProperties": False
    }  # fmt: skip
    number = {"type": "number", "minimum": -1000, "maximum": 1000}
    action = of_length(ACTIONS.shape[-2], of_length(ACTIONS.shape[-1], number))
    items = {"type": "object", "required": ["actions"], "properties": {"actions": of_length(1, action)}}
    with_items = {"prompt": {"const": prompt_of(0, 1)}, "items": {**items, "additionalProperties": False}}
    names = {"type": "object", "properties": {"actions": of_length(1, {"type": ["string", "null"], "minLength": 1})}}
    alone = {"prompt": {**ids, "maxItems": 20}, "items": {"const": {}}, "uuids": nothing}
    with_names = {**with_items, "uuids": {**names, "additionalProperties": False}}
    needed = ["prompt", "sampling_params"]
    kinds = ((alone, needed), (with_names, [*needed, "items"]))
    properties = {**body["properties"], **bounds}
    return {"anyOf": [{**body, "properties": {**properties, **kind}, "required": names} for kind, names in kinds]}


def of_length(length: int, of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": length, "maxItems": length}


@pytest.mark.parametrize("mode", ["negative", "positive"])
def test_requests_of_the_published_schema(server: Server, tmp_path: Path, mode: str) -> None:
    """No answer is the server's fault, none is another than the schema says. Of what fits the schema some is
    answered; most of the rest has 1.0 for 1, which JSON Schema takes for an integer."""
    schema = httpx.get(f"{server.url}/openapi.json", timeout=240).json()
    schema["paths"] = {path: of for path, of in schema["paths"].items() if path.startswith("/v1/mm/")}
    content = schema["paths"]["/v1/mm/generate"]["post"]["requestBody"]["content"]["application/json"]
    content["schema"] = narrowed(content["schema"])
    published = tmp_path / "openapi.json"
    published.write_text(json.dumps(schema))
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = ["-m", "schemathesis.cli", "run", str(published), "--url", server.url, "--checks", checks]
    command += ["--mode", mode, "--max-examples", "2500", "--phases", "examples,coverage,fuzzing", "--warnings", "off"]
    command += ["--header", f"Authorization: Bearer {KEY}"]
    before = answered(server)
    ran = subprocess.run([sys.executable, *command], cwd=tmp_path, env=os.environ, text=True, capture_output=True)
    assert ran.returncode == 0, ran.stdout[-5000:]
    counts = answered(server) - before
    print(f"answers of /v1/mm/generate: {dict(counts)}")
    assert mode == "negative" or counts["2xx"] > counts.total() / 50


def answered(server: Server) -> Counter[str]:
    """How often the route has answered, by status."""
    text = httpx.get(f"{server.url}/metrics", timeout=240).text
    counters = re.findall(r'http_requests_total\{handler="/v1/mm/generate".*status="(.xx)"\} (.+)', text)
    return Counter({status: int(float(count)) for status, count in counters})
