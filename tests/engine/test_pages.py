"""The code of the pages of documentation that start engines or servers."""

from pathlib import Path

import pytest

from tests.pages import PAGES, Page, complaint, read


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in map(read, PAGES) if page.engine], ids=lambda page: page.path.stem)
def test_page(page: Page, tmp_path: Path) -> None:
    assert complaint(page.path, tmp_path) == ""
