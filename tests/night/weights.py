"""What refusals cost: each kind of refused request, small to large, against one server.

    python -m tests.night.weights [--sizes 1024 1048576] [--store out/weights.json]

Memory and the length of the refusal are bounds; the latencies of /health are only told.
"""

from __future__ import annotations

import argparse
import base64
import json
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from mmkit.serve.process import Server

from .malformed import HEADERS, KEY, MAX_LEN
from .soak import terra_server

MIB = 2**20
SIZES = (1024, MIB, 16 * MIB, 63 * MIB)
GENERATE, COMPLETIONS, CHAT, SESSION = (
    "/v1/mm/generate", "/v1/completions", "/v1/chat/completions", "/v1/mm/session",
)  # fmt: skip
BODY_BYTES = 64 * MIB
FACTOR, SPARE, LONGEST = 4, 50 * MIB, 2048
"""A refusal takes at most so many times what was sent, and so many bytes more; its body is at most so long."""


def filled(before: str, unit: str, after: str) -> Callable[[int], str]:
    """A body of about some size, of which a unit is repeated."""

    def build(size: int) -> str:
        count = max(1, (size - len(before) - len(after)) // len(unit))
        return before + (unit * count).rstrip(",") + after

    return build


def items(before: str, unit: str, after: str) -> Callable[[int], str]:
    return filled(f'{{"prompt":[1],"items":{{"actions":[{before}', unit, f"{after}]}}}}")


def keys(before: str, after: str) -> Callable[[int], str]:
    return lambda size: before + ",".join(f'"{i:x}":1' for i in range(size // 10 + 1)) + after


def png(side: int) -> bytes:
    """A one-bit picture of zeros, which is a thousandth of its pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    pixels = zlib.compress(bytes(1 + (side + 7) // 8) * side, 9)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def pictures(kind: str, name: str, side: int) -> Callable[[int], str]:
    """As many large pictures as make up the size, at least one; or one video of them."""

    def build(size: int) -> str:
        content = base64.b64encode(png(side)).decode()
        count = min(200, max(1, size // len(content)))
        if kind == "video_url":
            urls = ["data:video/jpeg;base64," + ",".join([content] * count)]
        else:
            urls = ["data:image/png;base64," + content] * count
        return json.dumps({"prompt": [1], "items": {name: [{kind: {"url": url}} for url in urls]}})

    return build


ALLOWED, UUIDS = '{"prompt":[1],"sampling_params":{"allowed_token_ids":[', '{"prompt":[1],"uuids":{"actions":['
KINDS: dict[str, tuple[str, Callable[[int], str]]] = {
    "ids below 0": (GENERATE, filled(ALLOWED, "-1,", "]}}")),
    "texts for ids": (GENERATE, filled(ALLOWED, '"a",', "]}}")),
    "numbers for uuids": (GENERATE, filled(UUIDS, "1,", "]}}")),
    "unknown fields": (GENERATE, keys('{"prompt":[1],', "}")),
    "unknown modality": (GENERATE, filled('{"prompt":[1],"items":{"', "A", '":3}}')),
    "long model": (GENERATE, filled('{"prompt":[1],"model":"', "A", '"}')),
    "empty lists": (GENERATE, items("[", "[],", "]")),
    "numbers": (GENERATE, items("[", "1.5,", "]")),
    "objects": (GENERATE, items("", "{},", "")),
    "keys of an item": (GENERATE, keys('{"prompt":[1],"items":{"actions":[{', "}]}}")),
    "base64 that is too long": (GENERATE, items('{"dtype":"bool","shape":[1],"data":"', "AAAA", '"}')),
    "ids that the model lacks": (GENERATE, filled('{"prompt":[', "99,", "]}")),
    "a prompt too long": (GENERATE, filled('{"prompt":[' + "1," * MAX_LEN, "1,", "]}")),
    "a text without tokenizer": (GENERATE, filled('{"prompt":"', "a", '"}')),
    "kwargs": (GENERATE, filled('{"prompt":[1],"mm_processor_kwargs":{"a":[', '{"a":1},', "]}}")),
    "pictures for no modality": (GENERATE, pictures("image_url", "nothing", 6000)),
    "pictures for tensors": (GENERATE, pictures("image_url", "actions", 6000)),
    "a video for tensors": (GENERATE, pictures("video_url", "actions", 4000)),
    "no JSON": (GENERATE, filled('{"prompt":', "[", "")),
    "session: uuids": (
        SESSION,
        filled('{"type":"start","sampling_params":{"max_tokens":1},"prompt":[1],"uuids":{"actions":[', "1,", "]}}"),
    ),
    "session: a kind": (SESSION, filled('{"type":"', "A", '"}')),
    "session: lists": (
        SESSION,
        filled('{"type":"start","sampling_params":{"max_tokens":1},"items":{"actions":[', "[],", "]}}"),
    ),
    "completions: objects": (COMPLETIONS, filled('{"model":"terra","prompt":[', "{},", "]}")),
    "completions: ids": (COMPLETIONS, filled('{"model":"terra","prompt":[', "99,", "]}")),
    "completions: model": (COMPLETIONS, filled('{"prompt":[1],"model":"', "A", '"}')),
    "completions: texts": (COMPLETIONS, filled('{"model":"terra","prompt":[1],"stop":[', "1,", "]}")),
    "completions: fields": (COMPLETIONS, keys('{"model":"terra","prompt":["a",{}],', "}")),
    "completions: a text": (COMPLETIONS, filled('{"model":"terra","prompt":"', "a", '"}')),
    "chat: messages": (CHAT, filled('{"model":"terra","messages":[', "1,", "]}")),
    "chat: a role": (CHAT, filled('{"model":"terra","messages":[{"role":"', "A", '","content":3}]}')),
}


def serving(folder: Path) -> Server:
    """A server with the limits of the default, not started yet."""
    return terra_server(folder / "log", BODY_BYTES=BODY_BYTES, ELEMENTS=2**24, ITEMS=4096)


class Watch:
    """The memory of a server's front process, and how long its /health takes."""

    def __init__(self, server: Server) -> None:
        assert server.process is not None
        self._status = Path(f"/proc/{server.process.pid}/status")
        self._reset = Path(f"/proc/{server.process.pid}/clear_refs")
        self._url = f"{server.url}/health"

    def memory(self, name: str) -> int:
        """Bytes of VmRSS or VmHWM."""
        (line,) = [line for line in self._status.read_text().splitlines() if line.startswith(f"{name}:")]
        return 1024 * int(line.split()[1])

    @contextmanager
    def watching(self) -> Iterator[dict[str, float]]:
        """What a request costs while this is open: bytes at the peak, seconds of the slowest /health."""
        self._reset.write_text("5")
        before, peaks, over = self.memory("VmRSS"), {"peak": 0.0, "health": 0.0}, threading.Event()

        def ping() -> None:
            with httpx.Client(timeout=120) as client:
                while not over.wait(0.02):
                    began = time.perf_counter()
                    client.get(self._url)
                    peaks["health"] = max(peaks["health"], time.perf_counter() - began)

        pinging = threading.Thread(target=ping)
        pinging.start()
        try:
            yield peaks
        finally:
            over.set()
            pinging.join()
            peaks["peak"] = self.memory("VmHWM") - before


def refused(server: Server, path: str, body: bytes) -> tuple[int, int]:
    """Status and length of a refusal."""
    if path != SESSION:
        answer = httpx.post(server.url + path, content=body, headers=HEADERS, timeout=240)
        return answer.status_code, len(answer.content)
    url = server.url.replace("http", "ws") + path
    headers = {"authorization": f"Bearer {KEY}"}
    with connect(url, additional_headers=headers, max_size=None, compression=None) as socket:
        socket.recv(240)
        try:
            socket.send(body.decode())
            error = socket.recv(240)
        except ConnectionClosed as closed:
            if closed.rcvd is not None and closed.rcvd.code != 1009:  # the server takes no larger frames
                raise
            return 413, 0
        return json.loads(error)["error"]["code"], len(error)


def measure(server: Server, sizes: Any = SIZES, kinds: Any = tuple(KINDS)) -> list[dict[str, Any]]:
    """A row per kind and size."""
    watch, rows = Watch(server), []
    for name in kinds:
        path, build = KINDS[name]
        for size in sizes:
            body = build(size).encode()
            with watch.watching() as peaks:
                status, length = refused(server, path, body)
            bound = FACTOR * len(body) + SPARE
            row = {"kind": name, "bytes": len(body), "status": status, "answer": length, **peaks}
            is_short = length <= LONGEST or path not in (GENERATE, SESSION)  # vLLM's repeat what was sent
            row["held"] = peaks["peak"] <= bound and is_short and 400 <= status < 500
            rows.append(row)
            print(
                f"{name:32} {len(body) / MIB:8.3f} MiB  {status}  {length:5} B  +{peaks['peak'] / MIB:6.0f} MiB  "
                f"/health {peaks['health']:.2f} s{'' if row['held'] else '   NOT HELD'}",
                flush=True,
            )
    return rows


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--kinds", nargs="*", default=tuple(KINDS))
    parser.add_argument("--store", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        rows = measure(server, asked.sizes, asked.kinds)
    if asked.store:
        asked.store.parent.mkdir(parents=True, exist_ok=True)
        asked.store.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
