"""What the package index shows: the README, with links that lead somewhere there.

hatchling calls this at each build. A link of the README leads to a file of the repository; the
index has no such files. `repository` in pyproject.toml is the address.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

WITHOUT_ADDRESS = """
mmkit has no public address yet. The source distribution on this page holds the documentation, in
`docs/`, and everything else that the text above names.
"""

_CODE_OR_LINK = re.compile(
    r"^(?P<fence>```+).*?^(?P=fence)$"
    r"|(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)


class MetadataHook(MetadataHookInterface):
    """Gives hatchling the description of the project, and its address where there is one."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"]
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = write_description(readme, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if repository:
            metadata["urls"] = {"Repository": repository, "Issues": f"{repository}/issues"}


def write_description(readme: str, repository: str) -> str:
    """Return the README for the package index.

    Args:
        readme: its text, with links relative to the root of the repository.
        repository: the address of the repository, `https://HOST/OWNER/NAME`. Without one, links
            become their text, pictures what they show, and a sentence says where the files are.
    """

    def replace(match: re.Match[str]) -> str:
        if match["fence"]:
            return match[0]
        text = match["text"]
        if repository:
            view = "raw" if match["image"] else "blob"
            return f"{match['image']}[{text}]({repository}/{view}/main/{match['path']})"
        if match["image"]:
            return f"*Picture: {text}.*"
        return text

    description = _CODE_OR_LINK.sub(replace, readme)
    if not repository:
        description += WITHOUT_ADDRESS
    return description
