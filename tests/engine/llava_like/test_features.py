"""A feature of vLLM that asks something of the model class; tests/night/test_features.py has more, and
`python -m tools.features` runs all, on both sides."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.features.rows import FEATURES, Side


def test_lora_is_that_of_vllms_own_class(engines: ExitStack, llava: Any, tmp_path: Path) -> None:
    (feature,) = (feature for feature in FEATURES if feature.name.startswith("LoRA, mixed"))
    theirs, ours = (feature.run(Side(own, tmp_path / str(own), engines)) for own in (True, False))
    assert ours == theirs
