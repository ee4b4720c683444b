"""Imports mmkit.vllm_api with one vLLM after the other: `python -m tests.path.scripts_vllm_api FOLDER...`.

Each folder holds a `vllm/`. The first is imported as a whole. The others differ from it in vllm.multimodal alone, which
is imported anew, so that each costs a second and not ten.
"""

import importlib
import json
import sys
import warnings


def import_mmkit(folder: str) -> list[str]:
    """Return the module that was imported, or the error; and the warnings."""
    for name in [name for name in sys.modules if name.startswith(("vllm.multimodal", "mmkit"))]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    import vllm

    vllm.__path__[:], vllm.__file__ = [f"{folder}/vllm"], f"{folder}/vllm/__init__.py"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = importlib.import_module("mmkit.vllm_api").__name__
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
    return [outcome, *(str(warning.message) for warning in caught if "mmkit was tested" in str(warning.message))]


if __name__ == "__main__":
    print(json.dumps([import_mmkit(folder) for folder in sys.argv[1:]]))
