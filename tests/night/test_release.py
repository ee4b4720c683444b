"""What `make release` builds."""

from pathlib import Path

import pytest

from tools import release


@pytest.mark.skipif(not (release.ROOT / ".git").exists(), reason="no git repository: archives are built from HEAD")
def test_both_archives_hold_what_git_has(tmp_path: Path) -> None:
    release.check_contents(*release.build(tmp_path))
