"""What `make release` refuses, and what the wheel holds. `make wheel-test` installs it."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import release

if not (release.ROOT / ".git").exists():
    pytest.skip("a release is built from git", allow_module_level=True)


def test_both_archives_hold_what_git_has(tmp_path: Path) -> None:
    sdist, wheel = release.build(tmp_path)
    release.check_contents(sdist, wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tests/junk.py", "")
    with pytest.raises(SystemExit, match=r"must not hold \['tests/junk\.py'\]"):
        release.check_contents(sdist, wheel)
    with pytest.raises(SystemExit, match=r"an archive that lacks .*py.typed"):
        release.compare("wheel", set(), {"mmkit/py.typed"})


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository that is ready for 1.2.0."""
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "README.md").touch()
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (2030-01-02)\n\n## 1.1.0 (2029-01-02)\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "1.2.0")
    return tmp_path


def test_a_tree_that_is_ready(tree: Path) -> None:
    release.check_tree(tree, "1.2.0")
    git(tree, "tag", "v1.2.0")
    release.check_tree(tree, "1.2.0")


def test_a_tree_that_is_not(tree: Path) -> None:
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md: expected its first version to be 1\.1\.0, got 1\.2\.0"):
        release.check_tree(tree, "1.1.0")
    fragment = tree / "changelog.d" / "one.added.md"
    fragment.touch()
    with pytest.raises(SystemExit, match=r"expected a clean tree, got .*one.added.md"):
        release.check_tree(tree, "1.2.0")
    git(tree, "tag", "v1.2.0")
    git(tree, "add", "-A")
    git(tree, "commit", "-m", "later")
    with pytest.raises(SystemExit, match=r"expected no fragments, got one.added.md\. Run make changelog"):
        release.check_tree(tree, "1.2.0")
    git(tree, "rm", "changelog.d/one.added.md")
    git(tree, "commit", "-m", "told")
    with pytest.raises(SystemExit, match=r"v1\.2\.0: expected a tag of HEAD, or none, got one of another commit"):
        release.check_tree(tree, "1.2.0")
