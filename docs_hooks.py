"""Hooks of the site: pages from elsewhere in the repository, and links that lead to them.

The pages are written for a code host, where a link may lead to any file of the repository. In the
site a link to a file that is no page is shown as its text alone.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent

ELSEWHERE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the site that lie in the root of the repository."""

_CODE_OR_LINK = re.compile(
    r"^ *(?P<fence>```+|~~~+)(?s:.*?)^ *(?P=fence)[`~]* *$"
    r"|(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE,
)
_OUTSIDE = re.compile(r"[a-z][a-z+.-]*:|#|/")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere."""
    for source, uri in ELSEWHERE.items():
        files.append(
            File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8"))
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of a page for the site; what is in a fenced block stays as it is."""
    uri = page.file.src_uri
    if uri.startswith("data/"):
        page.meta["search"] = {"exclude": True}  # what programs write is linked, not searched
    home = next((source for source, target in ELSEWHERE.items() if target == uri), f"docs/{uri}")

    def changed(match: re.Match[str]) -> str:
        if match["fence"]:
            return match[0]
        target = site_link(match["target"], home, uri)
        return match["text"] if target is None else f"[{match['text']}]({target})"

    return _CODE_OR_LINK.sub(changed, markdown)


def site_link(target: str, home: str, uri: str) -> str | None:
    """Return a link as it is in the site.

    Return None if it leads to a file of the repository that is not part of the site.

    Args:
        target: the link, as it is written.
        home: path of the page in the repository.
        uri: path of the page in the site.
    """
    if _OUTSIDE.match(target):
        return target
    path, hash_sign, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(home), path))
    if path in ELSEWHERE:
        path = ELSEWHERE[path]
    elif path.startswith("docs/"):
        path = path.removeprefix("docs/")
    elif (ROOT / path).exists():
        return None
    else:
        return target  # for the validation to complain about
    return posixpath.relpath(path, posixpath.dirname(uri) or ".") + hash_sign + anchor
