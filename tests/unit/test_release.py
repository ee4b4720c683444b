"""What `make release` refuses of a tree. At night it builds; `make wheel-test` installs the wheel."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tools import release


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_trees(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    def refused(version: str, sentence: str) -> None:
        with pytest.raises(SystemExit, match=sentence):
            release.check_tree(tmp_path, version)

    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "README.md").touch()
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (2030-01-02)\n\n## 1.1.0 (2029-01-02)\n")
    for words in ("init", "add -A", "commit -m 1.2.0"):
        git(*words.split())
    release.check_tree(tmp_path, "1.2.0")
    refused("1.1.0", r"CHANGELOG\.md: expected its first version to be 1\.1\.0, got 1\.2\.0")
    git("tag", "v1.2.0")
    release.check_tree(tmp_path, "1.2.0")
    (tmp_path / "changelog.d" / "one.added.md").touch()
    refused("1.2.0", r"expected a clean tree, got .*one.added.md")
    for words in ("add -A", "commit -m later"):
        git(*words.split())
    refused("1.2.0", r"expected no fragments, got one.added.md\. Run make changelog")
    for words in ("rm changelog.d/one.added.md", "commit -m told"):
        git(*words.split())
    refused("1.2.0", r"v1\.2\.0: expected a tag of HEAD, or none, got one of another commit")


def test_archives_that_are_not_what_git_has() -> None:
    with pytest.raises(SystemExit, match=r"an archive that lacks .*py.typed"):
        release.compare("wheel", set(), {"mmkit/py.typed"})
    with pytest.raises(SystemExit, match=r"must not hold \['tests/junk\.py'\]"):
        release.compare("wheel", {"tests/junk.py"}, set())
