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
from tools.shared import ROOT, run_command

NAME = DISTRIBUTION.replace("-", "_")

IN_THE_WHEEL = {
    "mmkit/": "mmkit/",
    "pytest_mmkit.py": "pytest_mmkit.py",
    "examples/": "mmkit/cli/shipped/examples/",
    "deploy/": "mmkit/cli/shipped/deploy/",
    "requirements/fix_cpu_environment.py": (
        "mmkit/cli/shipped/requirements/fix_cpu_environment.py"
    ),
    "requirements/mmkit_torchvision_fix.py": (
        "mmkit/cli/shipped/requirements/mmkit_torchvision_fix.py"
    ),
}
"""Files of the repository, or folders, with where the wheel has them."""

METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}

FILES_SHOWN = 5
"""How many wrong files of an archive a message names."""

NEXT = """\
Nothing was uploaded. What comes next:
  git tag -a v{version} -m "mmkit {version}" && git push origin v{version}
  twine upload {files}"""


def main() -> None:
    version = run_command(sys.executable, "-m", "hatchling", "version").strip()
    check_tree(ROOT, version)
    sdist, wheel = build(ROOT / "dist")
    check_contents(sdist, wheel)
    run_command(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    for path in (sdist, wheel):
        megabytes = path.stat().st_size / 1e6
        print(f"{path.name}: {megabytes:.1f} MB, {len(list_files(path))} files")
    files = f"{sdist.relative_to(ROOT)} {wheel.relative_to(ROOT)}"
    print(NEXT.format(version=version, files=files))


def check_tree(root: Path, version: str) -> None:
    """Check that nothing is left to commit or to write into the changelog, and the version.

    Raises:
        SystemExit: names what is wrong.
    """
    changes = run_command("git", "status", "--porcelain", cwd=root).splitlines()
    if changes:
        refuse(str(root), "a clean tree", f"{changes[0]!r}", "Commit your changes.")
    fragments = []
    for path in (root / "changelog.d").glob("*.md"):
        if path.stem != "README":
            fragments.append(path.name)
    if fragments:
        remedy = "Run make changelog, then edit CHANGELOG.md."
        refuse("changelog.d", "no fragments", ", ".join(sorted(fragments)), remedy)
    changelog = (root / "CHANGELOG.md").read_text()
    heading = re.search(r"(?m)^## (\S+) \(\d{4}-\d\d-\d\d\)$", changelog)
    newest = heading[1] if heading else "none"
    if newest != version:
        refuse("CHANGELOG.md", f"its first version to be {version}", newest)
    tag = f"v{version}"
    has_tag = run_command("git", "tag", "--list", tag, cwd=root)
    head_has_tag = run_command("git", "tag", "--list", tag, "--points-at", "HEAD", cwd=root)
    if has_tag and not head_has_tag:
        remedy = "Raise __version__ in mmkit/__init__.py."
        refuse(tag, "a tag of HEAD, or none", "one of another commit", remedy)


def build(out: Path) -> tuple[Path, Path]:
    """Write the sdist of HEAD and its wheel into a folder, whose other files are removed.

    Raises:
        SystemExit: the tree itself makes another wheel.
    """
    rmtree(out, ignore_errors=True)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        archive = folder / "head.tar"
        run_command("git", "archive", "--output", archive, "HEAD")
        tree = folder / "tree"
        unpack_archive(archive, tree, filter="data")
        sdist = build_target(tree, "sdist", out)
        unpacked = folder / "unpacked"
        unpack_archive(sdist, unpacked, filter="data")
        (source,) = unpacked.iterdir()
        wheel = build_target(source, "wheel", out)
        direct_wheel = build_target(tree, "wheel", folder / "direct")
        if direct_wheel.read_bytes() != wheel.read_bytes():
            refuse(wheel.name, "the same wheel of the sdist and of the tree", "two")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Check that both archives hold what git has, and nothing else.

    Raises:
        SystemExit: names the files.
    """
    listing = run_command("git", "ls-tree", "-r", "--name-only", "-z", "HEAD")
    tracked = set(listing.split("\0")) - {""}
    compare(sdist.name, list_files(sdist), tracked | {"PKG-INFO"})
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    expected = {"mmkit/py.typed"}
    for name in METADATA:
        expected.add(f"{info}/{name}")
    for source, target in IN_THE_WHEEL.items():
        for path in tracked:
            if path.startswith(source):
                expected.add(target + path.removeprefix(source))
    compare(wheel.name, list_files(wheel), expected)


def compare(where: str, names: set[str], expected: set[str]) -> None:
    """Refuse an archive that lacks files or has files that git does not have."""
    for what, wrong in (("lacks", expected - names), ("must not hold", names - expected)):
        if wrong:
            shown = sorted(wrong)[:FILES_SHOWN]
            refuse(where, "the files that git has", f"an archive that {what} {shown}")


def list_files(archive: Path) -> set[str]:
    """Return the files of an sdist, below its folder, or of a wheel."""
    if archive.suffix == ".whl":
        return set(ZipFile(archive).namelist())
    names = set()
    with tarfile.open(archive) as members:
        for member in members:
            if member.isfile():
                names.add(member.name.partition("/")[2])
    return names


def build_target(tree: Path, target: str, out: Path) -> Path:
    """Build a target of a tree, and return its file, the only such file in `out`."""
    run_command(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out, cwd=tree)
    suffix = ".whl" if target == "wheel" else ".tar.gz"
    (archive,) = out.glob(f"{NAME}-*{suffix}")
    return archive


def refuse(where: str, expected: str, got: str, remedy: str = "") -> None:
    raise SystemExit(write_message(where, expected, got, remedy))


if __name__ == "__main__":
    main()
