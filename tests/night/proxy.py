"""An nginx before a server; that of deploy/nginx.conf tells its clients apart by their address."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from examples.server import Server, free_port
from tests import ROOT
from tests.night.malformed import KEY

_BOUND = 60.0
"""Seconds after which nginx is taken for broken."""

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
PATHS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
MAIN = """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    {paths}
    include {folder}/mmkit.conf;
}}
"""


class Proxy:
    """A running nginx on a free port.

    Args:
        folder: for its files.
        servers: the configuration of its servers, made of the port.
    """

    def __init__(self, folder: Path, servers: Callable[[int], str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        paths = " ".join(f"{name}_temp_path {folder}/{name};" for name in PATHS)
        (folder / "mmkit.conf").write_text(servers(self.port))
        (folder / "nginx.conf").write_text(MAIN.format(folder=folder, paths=paths))
        self._command = [str(NGINX), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]

    def start(self) -> None:
        """Start nginx, and wait until it listens."""
        self._process = subprocess.Popen(self._command)
        deadline = time.monotonic() + _BOUND
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=_BOUND).close()
            except ConnectionRefusedError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"nginx does not listen on port {self.port}")

    def stop(self) -> None:
        """All connections end, as when a network fails, and there are no new ones."""
        self._process.terminate()
        self._process.wait(120)

    def __enter__(self) -> Proxy:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def deployed(server: Server, folder: Path) -> Proxy:
    """With the configuration of deploy/ before a server, whose ports and keys are those of a test."""
    (folder / "keys").write_text(f'"~^Bearer \\Q{KEY}\\E$" 1;\n')

    def servers(port: int) -> str:
        given = (ROOT / "deploy" / "nginx.conf").read_text()
        for word, ours in {
            "listen 8080;": f"listen 127.0.0.1:{port};",
            "server 127.0.0.1:8000;": f"server 127.0.0.1:{server.port};",
            "/etc/nginx/mmkit-keys": f"{folder}/keys",
        }.items():
            assert word in given
            given = given.replace(word, ours)
        return given

    return Proxy(folder, servers)
