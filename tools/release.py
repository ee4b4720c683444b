"""Build what is released, and check it: ``make release``. Nothing is uploaded.

The sdist is built from the files that git has for HEAD, the wheel from the sdist, so that nothing
of a working directory gets into either.
"""

from __future__ import annotations

import re
import sys
import tarfile
from pathlib import Path
from shutil import rmtree, unpack_archive
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from mmkit.errors import DISTRIBUTION, write_message
from tools.shared import ROOT, run

NAME = DISTRIBUTION.replace("-", "_")

OF_CPU = ("requirements/fix_cpu_environment.py", "requirements/mmkit_torchvision_fix.py")
IN_THE_WHEEL = {path: f"mmkit/cli/shipped/{path}" for path in ("examples/", *OF_CPU)}
IN_THE_WHEEL |= {path: path for path in ("mmkit/", "pytest_mmkit.py")}
"""Files of the repository, or folders, by where the wheel has them."""

METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}

NEXT = """\
Nothing was uploaded. What comes next:
  git tag -a v{version} -m "mmkit {version}" && git push origin v{version}
  twine upload {files}"""


def main() -> None:
    version = run(sys.executable, "-m", "hatchling", "version").strip()
    check_tree(ROOT, version)
    out = ROOT / "dist"
    built = build(out)
    check_contents(*built)
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    for path in built:
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {len(files_of(path))} files")
    files = " ".join(str(path.relative_to(ROOT)) for path in built)
    print(NEXT.format(version=version, files=files))


def check_tree(root: Path, version: str) -> None:
    """Nothing is left to commit, nothing is left to be told, and all agree on the version.

    Raises:
        SystemExit: names what is wrong.
    """
    if changed := run("git", "status", "--porcelain", cwd=root).splitlines():
        refuse(str(root), "a clean tree", f"{changed[0]!r}", "Commit your changes.")
    fragments = sorted(p.name for p in (root / "changelog.d").glob("*.md") if p.stem != "README")
    if fragments:
        remedy = "Run make changelog, then edit CHANGELOG.md."
        refuse("changelog.d", "no fragments", ", ".join(fragments), remedy)
    told = re.findall(r"(?m)^## (\S+) \(\d{4}-\d\d-\d\d\)$", (root / "CHANGELOG.md").read_text())
    if told[:1] != [version]:
        refuse("CHANGELOG.md", f"its first version to be {version}", ", ".join(told[:1]) or "none")
    tag = f"v{version}"
    tagged = run("git", "tag", "--list", tag, "--points-at", "HEAD", cwd=root)
    if not tagged and run("git", "tag", "--list", tag, cwd=root):
        remedy = "Raise __version__ in mmkit/__init__.py."
        refuse(tag, "a tag of HEAD, or none", "one of another commit", remedy)


def build(out: Path) -> tuple[Path, Path]:
    """Write the sdist of HEAD and its wheel into a folder, whose other files are removed.

    Raises:
        SystemExit: the tree itself makes another wheel.
    """
    rmtree(out, ignore_errors=True)
    with TemporaryDirectory() as folder:
        tree, unpacked, direct = (Path(folder, name) for name in ("tree", "unpacked", "direct"))
        archive = Path(folder, "head.tar")
        run("git", "archive", "--output", archive, "HEAD")
        unpack_archive(archive, tree, filter="data")
        sdist = hatch(tree, "sdist", out)
        unpack_archive(sdist, unpacked, filter="data")
        wheel = hatch(*unpacked.iterdir(), "wheel", out)
        if hatch(tree, "wheel", direct).read_bytes() != wheel.read_bytes():
            refuse(wheel.name, "the same wheel of the sdist and of the tree", "two")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Both hold what git has, and nothing else.

    Raises:
        SystemExit: names the files.
    """
    tracked = set(run("git", "ls-tree", "-r", "--name-only", "-z", "HEAD").split("\0")) - {""}
    compare(sdist.name, files_of(sdist), tracked | {"PKG-INFO"})
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    expected = {f"{info}/{name}" for name in METADATA} | {"mmkit/py.typed"}
    for source, target in IN_THE_WHEEL.items():
        expected |= {target + p.removeprefix(source) for p in tracked if p.startswith(source)}
    compare(wheel.name, files_of(wheel), expected)


def compare(where: str, names: set[str], expected: set[str]) -> None:
    for what, wrong in (("lacks", expected - names), ("must not hold", names - expected)):
        if wrong:
            refuse(where, "the files that git has", f"an archive that {what} {sorted(wrong)[:5]}")


def files_of(archive: Path) -> set[str]:
    """The files of an sdist, below its folder, or of a wheel."""
    if archive.suffix == ".whl":
        return set(ZipFile(archive).namelist())
    with tarfile.open(archive) as opened:
        return {member.name.partition("/")[2] for member in opened if member.isfile()}


def hatch(tree: Path, target: str, out: Path) -> Path:
    """Build a target of a tree; its only file in the folder."""
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out, cwd=tree)
    (built,) = out.glob(f"{NAME}-*{'.whl' if target == 'wheel' else '.tar.gz'}")
    return built


def refuse(where: str, expected: str, got: str, remedy: str = "") -> None:
    raise SystemExit(write_message(where, expected, got, remedy))


if __name__ == "__main__":
    main()
