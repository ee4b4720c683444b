"""What `make release` builds."""

from pathlib import Path

import pytest

from tools import release


@pytest.mark.skipif(not (release.ROOT / ".git").exists(), reason="no git repository: archives are built from HEAD")
def test_both_archives_contain_the_files_of_git(tmp_path: Path) -> None:
    archives = release.build(tmp_path)
    release.check_contents(*archives)
