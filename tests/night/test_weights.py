"""A server under a bound of memory: refusals, which cost little more than what was sent, and streams that nobody reads.

`pytest -s` prints what each kind of refusal takes.
"""

import base64
import io
import json
import resource
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import httpx
import pytest
from PIL import Image
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from examples.server import Server
from tests.night.malformed import GENERATE, GREEDY, HEADERS, MAX_LEN, SESSION
from tests.night.soak import MIB, measure_memory, parse_metrics, terra_server, watch_peak

pytestmark = pytest.mark.timeout(3000)

# address space that the front process may take beside what it has once it serves; the refusals of before took more
ROOM = 512 * MIB
# a refusal takes at most so many times what was sent, and so many bytes more; its body is at most so long
FACTOR, SPARE, LONGEST = 4, 50 * MIB, 2048
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
START = '{"type":"start","sampling_params":{"max_tokens":1},"prompt":[1],'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the limits of the default."""
    limits = {"BODY_BYTES": 64 * MIB, "ELEMENTS": 2**24, "ITEMS": 4096}
    with terra_server(tmp_path_factory.mktemp("weights") / "log", **limits) as server:
        most = measure_memory(server, "VmSize") + ROOM
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (most, most))
        yield server


UNITS = ("99,", "-1,", "1.5,", '"a",', "[],", '{"a":1},')
ROWS: list[tuple[str, str, Sequence[str], str]] = [
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
"""Routes and bodies: how one begins, what is repeated in it, with a number for #, and its end."""
# the kind of a part, its modality, and the side of a picture
PICTURES = [("image_url", "nothing", 6000), ("image_url", "actions", 6000), ("video_url", "actions", 4000)]


def repeated(before: str, unit: str, after: str, size: int) -> str:
    count = size // len(unit.replace("#", f"{size:x}"))
    units = (unit.replace("#", f"{i:x}") for i in range(count)) if "#" in unit else [unit * count]
    return before + "".join(units).rstrip(",") + after


def pictured(kind: str, name: str, side: int, size: int) -> str:
    """As many large pictures as make up the size, at least one, or one video of them. They are one-bit zeros, which
    are a thousandth of their pixels."""
    Image.new("1", (side, side)).save(file := io.BytesIO(), "PNG")
    contents = [base64.b64encode(file.getvalue()).decode()] * min(200, max(1, size // len(file.getvalue())))
    urls = [f"data:image/png;base64,{content}" for content in contents]
    if kind == "video_url":
        urls = ["data:video/jpeg;base64," + ",".join(contents)]
    return json.dumps({"prompt": [1], "items": {name: [{kind: {"url": url}} for url in urls]}})


BODIES: dict[str, tuple[str, Callable[[int], str]]] = {
    f"{path} {before[:60]}{unit}": (path, partial(repeated, before, unit, after))
    for path, before, units, after in ROWS
    for unit in units
} | {f"{kind} {name}": (GENERATE, partial(pictured, kind, name, side)) for kind, name, side in PICTURES}


def refused(server: Server, path: str, body: str) -> tuple[int, int]:
    """Status and length of a refusal."""
    if path != SESSION:
        answer = httpx.post(server.url + path, content=body, headers=HEADERS, timeout=240)
        return answer.status_code, len(answer.content)
    url = server.url.replace("http", "ws") + path
    with connect(url, additional_headers=HEADERS, max_size=None, compression=None) as socket:
        socket.recv(240)
        try:
            socket.send(body)
            error = socket.recv(240)
        except ConnectionClosed as closed:
            if closed.rcvd is not None and closed.rcvd.code != 1009:  # the server takes no larger frames
                raise
            return 413, 0
        return json.loads(error)["error"]["code"], len(error)


@pytest.mark.parametrize("size", [1024, 2 * MIB, 63 * MIB], ids="{:,} bytes".format)
@pytest.mark.parametrize("name", BODIES)
def test_a_refusal_costs_little_more_than_what_was_sent(server: Server, name: str, size: int) -> None:
    path, build = BODIES[name]
    body = build(size)
    with watch_peak(server) as taken:
        status, length = refused(server, path, body)
    print(f"{status} {length:5} B  {taken() / MIB:+6.0f} MiB")
    assert 400 <= status < 500
    assert taken() <= FACTOR * len(body) + SPARE
    assert length <= LONGEST or path not in (GENERATE, SESSION), "vLLM's repeat what was sent"


# its sockets hold little, so that an answer of some 200 KB waits in the server
UNREAD = httpx.HTTPTransport(
    limits=httpx.Limits(max_connections=None), socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
)


def test_streams_that_nobody_reads(server: Server) -> None:
    body = {"prompt": [1], "stream": True, "sampling_params": {"max_tokens": 256, "logprobs": 20, **GREEDY}}
    with httpx.Client(timeout=600, transport=UNREAD, headers=HEADERS) as client:

        def hundred() -> int:
            """Memory when all of them have been generated, and none was read."""
            with ExitStack() as stack:
                streams = [client.stream("POST", f"{server.url}{GENERATE}", json=body) for _ in range(100)]
                assert {stack.enter_context(stream).status_code for stream in streams} == {200}
                while "vllm:num_requests_running" in (text := client.get(f"{server.url}/metrics").text):
                    gauges = parse_metrics(text)
                    if gauges["vllm:num_requests_running"] + gauges["vllm:num_requests_waiting"] == 0:
                        break
                    time.sleep(0.5)
                return measure_memory(server)

        first, *others = [hundred() for _ in range(3)]
    print(f"MiB with 100 unread streams: {[size / MIB for size in (first, *others)]}")
    assert max(others) - first < 20 * MIB
