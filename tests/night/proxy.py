"""The proxy of deploy/nginx.conf before a server, as a context manager; its clients are told apart by their address."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from mmkit.serve.process import Server, free_port
from tests import ROOT
from tests.night.malformed import KEY

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


def command(folder: Path, servers: str) -> list[str]:
    """What starts an nginx of these servers, whose files lie in a folder."""
    paths = " ".join(f"{name}_temp_path {folder}/{name};" for name in PATHS)
    (folder / "mmkit.conf").write_text(servers)
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, paths=paths))
    return [str(NGINX), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]


class Proxy:
    """A running nginx with the configuration of deploy/, whose ports and keys are those of a test.

    Args:
        server: what stands behind it.
        folder: for its files.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "error.log"
        given = (ROOT / "deploy" / "nginx.conf").read_text()
        for word, ours in {
            "listen 8080;": f"listen 127.0.0.1:{self.port};",
            "server 127.0.0.1:8000;": f"server 127.0.0.1:{server.port};",
            "/etc/nginx/mmkit-keys": f"{folder}/keys",
        }.items():
            assert word in given
            given = given.replace(word, ours)
        (folder / "keys").write_text(f'"Bearer {KEY}" 1;\n')
        self._command = command(folder, given)

    def __enter__(self) -> Proxy:
        self.process = subprocess.Popen(self._command)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(30)
