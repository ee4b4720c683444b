"""An nginx in front of a server. With deploy/nginx.conf, it distinguishes clients by their address."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from examples.server import Server, find_free_port
from tests import ROOT
from tests.night.malformed import KEY

_MAX_SECONDS = 60.0
"""Seconds that nginx may take to start."""

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
        configure_servers: returns the configuration of its servers for a port.
    """

    def __init__(self, folder: Path, configure_servers: Callable[[int], str]) -> None:
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        paths = " ".join(f"{name}_temp_path {folder}/{name};" for name in PATHS)
        (folder / "mmkit.conf").write_text(configure_servers(self.port))
        (folder / "nginx.conf").write_text(MAIN.format(folder=folder, paths=paths))
        self._command = [str(NGINX), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]

    def start(self) -> None:
        """Start nginx, and wait until it listens."""
        self._process = subprocess.Popen(self._command)
        deadline = time.monotonic() + _MAX_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=_MAX_SECONDS).close()
            except ConnectionRefusedError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"nginx does not listen on port {self.port}")

    def stop(self) -> None:
        """End all connections, as when a network fails, and accept no new ones."""
        self._process.terminate()
        self._process.wait(120)

    def __enter__(self) -> Proxy:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def make_deployed_proxy(server: Server, folder: Path, key: str = KEY) -> Proxy:
    """Return a proxy with the configuration of deploy/, in which ports and keys are those of the test."""
    (folder / "keys").write_text(f'"~^(Bearer|Api-Key) \\Q{key}\\E$" 1;\n')

    def configure_servers(port: int) -> str:
        text = (ROOT / "deploy" / "nginx.conf").read_text()
        replacements = {
            "listen 8080;": f"listen 127.0.0.1:{port};",
            "server 127.0.0.1:8000;": f"server 127.0.0.1:{server.port};",
            "/etc/nginx/mmkit-keys": f"{folder}/keys",
        }
        for deployed, replacement in replacements.items():
            assert deployed in text
            text = text.replace(deployed, replacement)
        return text

    return Proxy(folder, configure_servers)
