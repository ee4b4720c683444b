"""The sources of generated classes, without vLLM."""

from __future__ import annotations

import pytest

from examples.series.reference import WavesForCausalLM
from examples.series.spec import WAVES
from mmkit.generate import write_model_source, write_source

OF_FOLDER = "transformers_modules.waves.5a71086fd760c195.modeling"
"""A module of a checkpoint folder: transformers names a package by a hash, which may begin with a digit."""


@pytest.mark.parametrize("home", ["my_package.modeling", OF_FOLDER])
def test_a_source_imports_its_origin_whatever_its_package_is_called(home: str) -> None:
    for source in (
        write_model_source(WavesForCausalLM, f"{home}.WavesForCausalLM"),
        write_source(WAVES, f"{home}.WAVES", "vllm_api"),
    ):
        compile(source, home, "exec")
        assert home in source


@pytest.mark.parametrize(("home", "is_announced"), [("my_package.modeling", True), (OF_FOLDER, False)])
def test_the_class_of_a_folder_is_not_announced(home: str, is_announced: bool) -> None:
    """Other processes cannot import it by its name before they have looked at the folder."""
    source = write_model_source(WavesForCausalLM, f"{home}.WavesForCausalLM")
    assert ("announce(__name__)" in source) == is_announced
