"""The end of API servers whose head process is gone."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing import parent_process
from threading import Thread

import psutil


def end_with_head() -> None:
    """Let an API server, and all processes that vLLM started beside it, end with the process that
    started them.

    That process ends them itself, unless it is killed. They would then go on, and share their port
    with the server that a supervisor starts in its place.
    """
    head = parent_process()
    if head is None or head.pid is None:  # the only API server starts the engine itself
        return
    family = psutil.Process(head.pid).children()

    def watch() -> None:
        head.join()
        for process in family:
            with suppress(psutil.Error):
                # an API server tells its clients; an engine that nobody asks may take half a minute
                if "APIServer" in process.name():
                    process.terminate()
                else:
                    process.kill()

    Thread(target=watch, name="mmkit: head", daemon=True).start()
