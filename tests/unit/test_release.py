"""What `make release` refuses of a tree. At night it builds; `make wheel-test` installs the wheel."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tools import release


class Repository:
    """A git repository of a changelog."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fragments = root / "changelog.d"
        self.fragments.mkdir()
        (self.fragments / "README.md").touch()
        changelog = "# Changelog\n\n## 1.2.0 (2030-01-02)\n\n## 1.1.0 (2029-01-02)\n"
        (root / "CHANGELOG.md").write_text(changelog)
        self.git("init")
        self.commit("1.2.0")

    def git(self, *words: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        subprocess.run(["git"] + identity + list(words), cwd=self.root, check=True, capture_output=True)

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-m", message)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    return Repository(tmp_path)


def check_refusal(repository: Repository, version: str, sentence: str) -> None:
    with pytest.raises(SystemExit, match=sentence):
        release.check_tree(repository.root, version)


def test_the_first_version_of_the_changelog_is_released(repository: Repository) -> None:
    release.check_tree(repository.root, "1.2.0")
    sentence = r"CHANGELOG\.md: expected its first version to be 1\.1\.0, got 1\.2\.0"
    check_refusal(repository, "1.1.0", sentence)


def test_a_tree_that_is_not_committed_is_refused(repository: Repository) -> None:
    (repository.fragments / "one.added.md").touch()
    check_refusal(repository, "1.2.0", r"expected a clean tree, got .*one.added.md")


def test_a_fragment_that_the_changelog_lacks_is_refused(repository: Repository) -> None:
    (repository.fragments / "one.added.md").touch()
    repository.commit("add a fragment")
    check_refusal(repository, "1.2.0", r"expected no fragments, got one.added.md\. Run make changelog")


def test_a_tag_of_another_commit_is_refused(repository: Repository) -> None:
    repository.git("tag", "v1.2.0")
    release.check_tree(repository.root, "1.2.0")
    repository.git("commit", "--allow-empty", "-m", "later")
    check_refusal(repository, "1.2.0", r"v1\.2\.0: expected a tag of HEAD, or none, got one of another commit")


def test_archives_that_are_not_what_git_has() -> None:
    with pytest.raises(SystemExit, match=r"an archive that lacks .*py.typed"):
        release.compare("wheel", set(), {"mmkit/py.typed"})
    with pytest.raises(SystemExit, match=r"must not hold \['tests/junk\.py'\]"):
        release.compare("wheel", {"tests/junk.py"}, set())
