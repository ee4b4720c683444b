"""Mend what SGLang lacks on a CPU, in the environment of the interpreter that runs this.

`make sglang` runs it, with the folder requirements/ on the path.

- Its kernels, the distribution `sglang-kernel`, are built for CUDA alone. Where there are none,
  this makes a module `sgl_kernel` without any: SGLang imports names from it when it starts, and on
  a CPU without AMX it calls none of them. A call raises NotImplementedError.
- torchvision's usual builds are for CUDA: see requirements/fix_cpu_environment.py.

A second run changes nothing. Both appear as distributions, so that `pip list` shows and
`pip uninstall` removes them.
"""

from importlib.util import find_spec
from pathlib import Path

import fix_cpu_environment
from fix_cpu_environment import FIX, install, torchvision_is_broken

NO_KERNELS = '''\
"""No kernels: `sglang-kernel` has no build for a CPU. Every name is a function that refuses."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args, **options):
        raise NotImplementedError(f"sgl_kernel.{name}: no build for a CPU")

    return refuse
'''


def main() -> None:
    if find_spec("sgl_kernel") is None:
        install("mmkit_no_sgl_kernel", "1", {"sgl_kernel.py": NO_KERNELS})
    if torchvision_is_broken():
        module = Path(fix_cpu_environment.__file__).with_name(f"{FIX}.py").read_text()
        install(FIX, "1", {f"{FIX}.py": module, f"{FIX}.pth": f"import {FIX}\n"})


if __name__ == "__main__":
    main()
