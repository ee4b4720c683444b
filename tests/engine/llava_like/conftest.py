"""One engine with the LLaVA-like model for all tests of this folder, and the requests that it answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from examples.llava_like import ARCHITECTURE, register
from examples.llava_like.cases import Case, make_cases
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.offline import answer, engine
from examples.llava_like.reference import Reference
from examples.server import Server
from mmkit.serve import Client
from tests.engine.llava_like.bodies import TIMEOUT
from tests.engine.processes import engines_in_this_process

SERVER_OPTIONS = (
    "--dtype float32 --block-size 32 --enable-mm-embeds --served-model-name llava --max-num-seqs 16 --enforce-eager "
    "--additional-config.render_processes 2 --enable-prompt-embeds --shutdown-timeout 240"
)
OVERRIDES = f'{{"architectures": ["{ARCHITECTURE}"]}}'


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="package")
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="package")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="package")
def cases(tokenizer: Any) -> list[Case]:
    return make_cases(tokenizer, 60)


@pytest.fixture(scope="package")
def llava(checkpoint: Path) -> Iterator[Any]:
    register()
    with engines_in_this_process() as engines:
        yield engines.enter_context(engine(checkpoint, seed=0, enforce_eager=True))


@pytest.fixture(scope="package")
def answers(llava: Any, cases: list[Case]) -> list[list[int]]:
    """The model's ids, from cold caches."""
    return answer(llava, [case.request() for case in cases])


@pytest.fixture(scope="package")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two processes that render. The last test of test_server.py ends it."""
    options = [*SERVER_OPTIONS.split(), "--hf-overrides", OVERRIDES]
    with Server(checkpoint, *options, log=tmp_path_factory.mktemp("serve") / "log") as server:
        head = psutil.Process(server.process.pid)
        renderers = [child for child in head.children() if child.nice() > head.nice()]
        assert len(renderers) == 2
        yield server


@pytest.fixture(scope="package")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout=TIMEOUT) as client:
        yield client
