"""A server with bounded memory: refusals, which cost little more than the request, and streams that nobody reads.

`pytest -s` prints what each kind of refusal takes.
"""

import base64
import io
import json
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import httpx
import pytest
from PIL import Image
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from examples.server import Server
from tests.night.malformed import GENERATE, GREEDY, HEADERS, MAX_LEN, SESSION
from tests.night.soak import MIB, measure_memory, parse_metrics, terra_server, watch_peak

pytestmark = pytest.mark.timeout(3000)

SPARE_ADDRESS_SPACE = 512 * MIB
"""Address space that the front process may take in addition to what it has once it serves."""
# a refusal takes at most FACTOR times the bytes of the request, and SPARE_BYTES
FACTOR = 4
SPARE_BYTES = 50 * MIB
MAX_REFUSAL_BYTES = 2048
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
START = '{"type":"start","sampling_params":{"max_tokens":1},"prompt":[1],'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the default limits."""
    limits = {"BODY_BYTES": 64 * MIB, "ELEMENTS": 2**24, "ITEMS": 4096}
    with terra_server(tmp_path_factory.mktemp("weights") / "log", **limits) as server:
        limit = measure_memory(server, "VmSize") + SPARE_ADDRESS_SPACE
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (limit, limit))
        yield server


UNITS = ("99,", "-1,", "1.5,", '"a",', "[],", '{"a":1},')
REPETITIONS: list[tuple[str, str, Sequence[str], str]] = [
    (GENERATE, '{"prompt":[', UNITS, "]}"),
    (GENERATE, '{"prompt":[' + "1," * MAX_LEN, ["1,"], "]}"),
    (GENERATE, '{"prompt":[1],"sampling_params":{"allowed_token_ids":[', UNITS, "]}}"),
    (GENERATE, '{"prompt":[1],"uuids":{"actions":[', UNITS, "]}}"),
    (GENERATE, '{"prompt":[1],"items":{"actions":[', UNITS, "]}}"),
    (GENERATE, '{"prompt":[1],"items":{"actions":[[', UNITS, "]]}}"),
    (GENERATE, '{"prompt":[1],"mm_processor_kwargs":{"a":[', UNITS, "]}}"),
    (SESSION, START + '"uuids":{"actions":[', UNITS, "]}}"),
    (SESSION, START + '"items":{"actions":[', UNITS, "]}}"),
    (COMPLETIONS, '{"model":"terra","prompt":[', ["99,", "{},"], "]}"),
    (COMPLETIONS, '{"model":"terra","prompt":[1],"stop":[', ["1,"], "]}"),
    (CHAT, '{"model":"terra","messages":[', ["1,"], "]}"),
    (GENERATE, '{"prompt":"', "a", '"}'),
    (GENERATE, '{"prompt":[1],"model":"', "A", '"}'),
    (GENERATE, '{"prompt":[1],"items":{"', "A", '":3}}'),
    (GENERATE, '{"prompt":[1],"items":{"actions":[{"dtype":"bool","shape":[1],"data":"', ["AAAA"], '"}]}}'),
    (GENERATE, '{"prompt":', "[", ""),
    (GENERATE, '{"prompt":[1],', ['"#":1,'], "}"),
    (GENERATE, '{"prompt":[1],"items":{"actions":[{', ['"#":1,'], "}]}}"),
    (SESSION, '{"type":"', "A", '"}'),
    (COMPLETIONS, '{"prompt":[1],"model":"', "A", '"}'),
    (COMPLETIONS, '{"model":"terra","prompt":"', "a", '"}'),
    (COMPLETIONS, '{"model":"terra","prompt":["a",{}],', ['"#":1,'], "}"),
    (CHAT, '{"model":"terra","messages":[{"role":"', "A", '","content":3}]}'),
]
"""Routes and bodies: the beginning of a body, the units that are repeated in it, each in a test, and its end. In each
repetition, a number replaces #."""


@dataclass(frozen=True)
class RepeatedUnit:
    """A body in which a unit is repeated until it has a size."""

    path: str
    beginning: str
    unit: str
    end: str

    def build(self, size: int) -> str:
        count = size // len(self.unit.replace("#", f"{size:x}"))
        if "#" in self.unit:
            repetitions = "".join(self.unit.replace("#", f"{number:x}") for number in range(count))
        else:
            repetitions = self.unit * count
        return self.beginning + repetitions.rstrip(",") + self.end


@dataclass(frozen=True)
class Pictures:
    """A body of as many large pictures as make up a size, at least one, or of one video of them.

    The pictures are one-bit zeros: a file has a thousandth of the bytes of its pixels.
    """

    kind: str
    modality: str
    side: int
    path: str = GENERATE

    def build(self, size: int) -> str:
        file = io.BytesIO()
        Image.new("1", (self.side, self.side)).save(file, "PNG")
        picture = base64.b64encode(file.getvalue()).decode()
        count = min(200, max(1, size // len(file.getvalue())))
        if self.kind == "video_url":
            urls = ["data:video/jpeg;base64," + ",".join([picture] * count)]
        else:
            urls = [f"data:image/png;base64,{picture}"] * count
        items = [{self.kind: {"url": url}} for url in urls]
        return json.dumps({"prompt": [1], "items": {self.modality: items}})


Body = RepeatedUnit | Pictures


def list_bodies() -> dict[str, Body]:
    bodies: dict[str, Body] = {}
    for path, beginning, units, end in REPETITIONS:
        for unit in units:
            bodies[f"{path} {beginning[:60]}{unit}"] = RepeatedUnit(path, beginning, unit, end)
    bodies["image_url nothing"] = Pictures("image_url", "nothing", 6000)
    bodies["image_url actions"] = Pictures("image_url", "actions", 6000)
    bodies["video_url actions"] = Pictures("video_url", "actions", 4000)
    return bodies


BODIES = list_bodies()


class Refusal(NamedTuple):
    status: int
    num_bytes: int


def send(server: Server, path: str, content: str) -> Refusal:
    if path != SESSION:
        answer = httpx.post(server.url + path, content=content, headers=HEADERS, timeout=240)
        return Refusal(answer.status_code, len(answer.content))
    return send_message(server, content)


def send_message(server: Server, content: str) -> Refusal:
    """Send the first message of a session."""
    url = server.url.replace("http", "ws") + SESSION
    with connect(url, additional_headers=HEADERS, max_size=None, compression=None) as socket:
        socket.recv(240)
        try:
            socket.send(content)
            error = socket.recv(240)
        except ConnectionClosed as closed:
            # by 1009 the server rejects a frame that is too large
            if closed.rcvd is not None and closed.rcvd.code != 1009:
                raise
            return Refusal(413, 0)
        return Refusal(json.loads(error)["error"]["code"], len(error))


@pytest.mark.parametrize("size", [1024, 2 * MIB, 63 * MIB], ids="{:,} bytes".format)
@pytest.mark.parametrize("name", BODIES)
def test_a_refusal_costs_little_more_than_what_was_sent(server: Server, name: str, size: int) -> None:
    body = BODIES[name]
    content = body.build(size)

    with watch_peak(server) as measure_growth:
        refusal = send(server, body.path, content)

    print(f"{refusal.status} {refusal.num_bytes:5} B  {measure_growth() / MIB:+6.0f} MiB")
    assert 400 <= refusal.status < 500
    assert measure_growth() <= FACTOR * len(content) + SPARE_BYTES
    # refusals of vLLM's own routes may repeat the request
    if body.path in (GENERATE, SESSION):
        assert refusal.num_bytes <= MAX_REFUSAL_BYTES


# its sockets hold little, so that an answer of some 200 KB waits in the server
UNREAD = httpx.HTTPTransport(
    limits=httpx.Limits(max_connections=None), socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
)


def wait_until_generated(client: httpx.Client, server: Server) -> None:
    """Wait until no request is running or waiting, or the server has no such metrics yet."""
    while True:
        text = client.get(f"{server.url}/metrics").text
        if "vllm:num_requests_running" not in text:
            return
        metrics = parse_metrics(text)
        if metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"] == 0:
            return
        time.sleep(0.5)


def measure_memory_with_unread_streams(client: httpx.Client, server: Server) -> int:
    """Return the bytes of the front process when 100 streams have been generated, and none was read."""
    body = {"prompt": [1], "stream": True, "sampling_params": {"max_tokens": 256, "logprobs": 20, **GREEDY}}
    with ExitStack() as stack:
        for _ in range(100):
            answer = stack.enter_context(client.stream("POST", f"{server.url}{GENERATE}", json=body))
            assert answer.status_code == 200
        wait_until_generated(client, server)
        return measure_memory(server)


def test_streams_that_nobody_reads_leave_no_memory_behind(server: Server) -> None:
    with httpx.Client(timeout=600, transport=UNREAD, headers=HEADERS) as client:
        first = measure_memory_with_unread_streams(client, server)
        second = measure_memory_with_unread_streams(client, server)
        third = measure_memory_with_unread_streams(client, server)
    print(f"MiB with 100 unread streams: {first / MIB}, {second / MIB}, {third / MIB}")
    assert max(second, third) - first < 20 * MIB
