"""What the package index shows of the README: no link leads into a repository that it does not have."""

import re

import pytest
from hatch_build import WITHOUT_ADDRESS, write_description

from tests import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "https://example.org/owner/mmkit"
LINK = re.compile(r"\]\(([^)]*)\)")


@pytest.mark.parametrize("address", ["", ADDRESS])
def test_each_link_of_the_description_leads_somewhere(address: str) -> None:
    description = write_description(README, address)
    for link in LINK.findall(description):
        assert link.startswith("https://")
    assert description.endswith(WITHOUT_ADDRESS) == (address == "")


def test_links_and_pictures_lead_to_files_of_the_repository() -> None:
    text = "![a town](a/b.gif) [it](c.md#d)\n```\n[x](y)\n```\n"
    blob, raw = f"{ADDRESS}/blob/main", f"{ADDRESS}/raw/main"
    expected = f"![a town]({raw}/a/b.gif) [it]({blob}/c.md#d)\n```\n[x](y)\n```\n"
    assert write_description(text, ADDRESS) == expected
    assert write_description(text, "").startswith("*Picture: a town.* it\n```\n[x](y)\n```\n")
