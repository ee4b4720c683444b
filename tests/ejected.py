"""Examples with a copy of mmkit inside, and an environment in which there is no mmkit."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests import ROOT

_NO_MMKIT = '''\
"""Neither the modules of mmkit nor its entry points, and nothing of the tests."""

import sys
from importlib.metadata import Distribution


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mmkit", "tests"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
discover = Distribution.discover
Distribution.discover = lambda **given: (d for d in discover(**given) if d.name != "vllm-mmkit")
'''


def ejected(folder: Path, *names: str, **modules: str) -> dict[str, str]:
    """Copy packages of the examples, and `mmkit eject` them.

    Args:
        folder: where `examples` goes.
        names: of the packages.
        modules: texts of modules to add to each package before.

    Returns:
        The environment in which they are found, and mmkit is not.
    """
    examples = folder / "examples"
    examples.mkdir()
    shutil.copy(ROOT / "examples" / "__init__.py", examples)
    for name in names:
        shutil.copytree(ROOT / "examples" / name, examples / name)
        for module, text in modules.items():
            (examples / name / f"{module}.py").write_text(text)
        command = [sys.executable, "-m", "mmkit", "eject", f"examples.{name}"]
        subprocess.run(command, cwd=folder, check=True)
    (folder / "sitecustomize.py").write_text(_NO_MMKIT)
    return {"PYTHONPATH": str(folder), "VLLM_PLUGINS": ",".join(names)}
