"""Hooks of the site: pages from elsewhere in the repository, and links that hold on a code host and in the site.

The pages are written for a code host, where a link may lead to any file of the repository. In the site a link to a file
that is no page is shown as its text alone.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent

ELSEWHERE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the site that lie in the root of the repository."""

_FENCE = re.compile(r"^( *)(```+|~~~+)")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
_OUTSIDE = re.compile(r"[a-z][a-z+.-]*:|#|/")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere, and notebooks as pages."""
    for source, uri in ELSEWHERE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            text = notebook_page(json.loads(Path(str(file.abs_src_path)).read_text(encoding="utf-8")))
            uri = file.src_uri.removesuffix(".ipynb") + ".md"
            files.append(File.generated(config, uri, content=text, inclusion=InclusionLevel.INCLUDED))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of a page for the site."""
    uri = page.file.src_uri
    home = next((source for source, made in ELSEWHERE.items() if made == uri), f"docs/{uri}")

    def changed(match: re.Match[str]) -> str:
        text, target = match.groups()
        made = site_link(target, home, uri)
        return text if made is None else f"[{text}]({made})"

    return outside_code(markdown, lambda line: _LINK.sub(changed, line))


def site_link(target: str, home: str, uri: str) -> str | None:
    """What a link becomes: None if it leads to a file of the repository that is not part of the site.

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
        if path.endswith(".ipynb"):
            path = path.removesuffix(".ipynb") + ".md"
    elif (ROOT / path).exists():
        return None
    else:
        return target  # for the validation to complain about
    return posixpath.relpath(path, posixpath.dirname(uri) or ".") + hash_sign + anchor


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """A text, each line of which that is in no fenced block has been changed."""
    lines, fence = markdown.split("\n"), ""
    for i, line in enumerate(lines):
        found = _FENCE.match(line)
        if fence:
            if found and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif found:
            fence = found[2]
        else:
            lines[i] = change(line)
    return "\n".join(lines)


def notebook_page(notebook: dict[str, Any]) -> str:
    """A notebook as a page: text cells as they are, code cells with what they printed, pictures inline."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source.strip():
            parts.append(f"```python\n{source.rstrip()}\n```")
            parts += filter(None, map(_output, cell.get("outputs", [])))
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:  # no blank line may end the HTML block
            return re.sub(r"\n\s*\n", "\n", f"<div>\n{''.join(data[kind])}\n</div>")
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return f"```text\n{text}\n```" if text and output.get("name") != "stderr" else ""
