"""One engine with the LLaVA-like model for all tests of this folder, and the requests that it answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.llava_like import register
from examples.llava_like.cases import Case, make_cases
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.offline import answer, engine
from examples.llava_like.reference import Reference
from tests.engine.processes import engines_in_this_process


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
