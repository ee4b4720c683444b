"""A server in a process of its own, for tests, demos and notebooks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx

from mmkit import MmkitError


class Server:
    """``python -m mmkit.serve`` on this machine, as a context manager.

    It listens on 127.0.0.1 only.

    Args:
        model: directory of a checkpoint.
        options: more arguments of ``vllm serve``.
        port: port to listen on; None takes a free one.
        environment: variables on top of this process's.
        log: file for the server's output; None drops the output.
        start_seconds: the most seconds until the server answers.
    """

    def __init__(
        self,
        model: Path | str,
        *options: str,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        start_seconds: float = 300.0,
    ) -> None:
        self.port = port or find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "mmkit.serve", str(model), *options]
        self._command.extend(("--host", "127.0.0.1", "--port", str(self.port)))
        self._environment = dict(os.environ)
        self._environment.update(environment or {})
        self._log = log
        self._start_seconds = start_seconds
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and return when it is healthy.

        Raises:
            MmkitError: the server ended, or took too long.
        """
        with open(self._log or os.devnull, "wb") as output:
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait(self.process)
        except BaseException:
            self.stop()
            raise

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Return when the server is healthy.

        Raises:
            MmkitError: the server ended, or took too long.
        """
        deadline = time.monotonic() + self._start_seconds
        got = "none"
        while time.monotonic() < deadline:
            status = process.poll()
            if status is not None:
                got = f"one that ended with {status}"
                break
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.25)
        remedy = "Give it a log file to see why."
        if self._log is not None:
            remedy = f"Its log ends:\n{self._log.read_text(errors='replace')[-2000:]}"
        raise MmkitError(self.url, f"a server within {self._start_seconds:g} s", got, remedy)

    def stop(self, seconds: float = 30.0) -> int | None:
        """Stop the server by SIGTERM, and after `seconds` by SIGKILL, with all its processes.

        Returns:
            The exit status; None if the server was never started.
        """
        process = self.process
        if process is None:
            return None
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        # the engine's processes are in its group, and may outlive it
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def find_free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
