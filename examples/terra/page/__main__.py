"""Drive through Terra's world in a browser: ``python -m examples.terra.page --help``."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from examples.server import Server

from .. import CHECKPOINT
from ..drafts import FRAME_TOKENS, make_speculative_config
from ..serve_demo import OPTIONS


def main(
    model: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT,
    port: Annotated[int, typer.Option(help="Of the server, on this machine.")] = 8000,
    drafts: Annotated[int, typer.Option(min=0, help="Tokens that vLLM drafts per step; see VllmTerra.")] = FRAME_TOKENS,
) -> None:
    """Serve the page until ctrl-C."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    options = ["--speculative-config", json.dumps(make_speculative_config(drafts))] if drafts else []
    print("Starting the server, half a minute ...", flush=True)
    with Server(model, *OPTIONS, *options, port=port) as server:
        print(f"Drive at {server.url}/terra, and end it with ctrl-C.", flush=True)
        with suppress(KeyboardInterrupt):
            server.process.wait()


if __name__ == "__main__":
    typer.run(main)
