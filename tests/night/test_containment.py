"""L14 in the real engine, all models in all dtypes."""

from pathlib import Path

import pytest

from tests.engine.containment import DTYPES, MODELS, check


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_no_request_changes_the_answers_of_others(model: str, dtype: str, tmp_path: Path) -> None:
    check(model, dtype, tmp_path)
