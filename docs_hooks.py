"""Hooks of the site: pages from elsewhere, links that lead to files, docstrings, buttons.

The pages are written for a code host, where a link may lead to any file of the repository. In the
site such a link leads to the address of the repository (`repository` in pyproject.toml). While
there is none, it is shown as its text alone.
"""

from __future__ import annotations

import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # mkdocs as a command has another folder there

from tools.messages import write_messages  # noqa: E402

ELSEWHERE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the site that lie in the root of the repository."""

DOCSTRINGS = {
    "document": [
        "mmkit.document.to_document",
        "mmkit.document.from_document",
        "mmkit.document.SpecModel",
        "mmkit.document.build_json_schema",
        "mmkit.document.list_functions",
        "mmkit.document.find_differences",
        "mmkit.document.Difference",
        "mmkit.document.FunctionStubs",
    ],
    "errors": ["mmkit.MmkitError", "mmkit.SpecError", "mmkit.InputError"],
    "expressions": [
        "mmkit.Scope",
        "mmkit.later",
        "mmkit.where",
        "mmkit.ceil_div",
        "mmkit.minimum",
        "mmkit.maximum",
        "mmkit.largest_of",
    ],
    "fields": [
        "mmkit.language.field.Field\n    options: {heading: Every field, members: false}",
        "mmkit.language.field.Batched\n    options: {heading: batched}",
        "mmkit.language.field.Flat\n    options: {heading: flat, members: false}",
        "mmkit.language.field.Derived\n    options: {heading: derived}",
        "mmkit.language.field.Constant\n    options: {heading: constant}",
        "mmkit.language.field.Identity\n    options: {heading: identity}",
        "mmkit.language.field.HF\n    options: {heading: hf}",
    ],
    "items": [
        "mmkit.Tensor",
        "mmkit.Record",
        "mmkit.List",
        "mmkit.optional",
        "mmkit.Text",
        "mmkit.Image",
        "mmkit.Video",
        "mmkit.Audio",
        "mmkit.between",
    ],
    "language": [
        "mmkit.embed",
        "mmkit.literal",
        "mmkit.select",
        "mmkit.each",
        "mmkit.any_id",
        "mmkit.replace",
        "mmkit.insert",
        "mmkit.already_expanded",
        "mmkit.ending_with",
    ],
    "model": [
        "mmkit.MultiModalModel",
        "mmkit.serve_transformers",
        "mmkit.model.sampling.sampling_params",
    ],
    "plan": ["mmkit.plan.plan.Plan"],
    "serve": [
        "mmkit.serve.Client",
        "mmkit.serve.client.Session",
        "mmkit.serve.encode",
        "mmkit.serve.content_part",
    ],
    "spec": ["mmkit.ModelSpec", "mmkit.Modality", "mmkit.Output", "mmkit.Policy", "mmkit.concat"],
    "testing": [
        "mmkit.testing.check",
        "mmkit.testing.parametrize",
        "mmkit.testing.of_spec",
        "mmkit.testing.of_registered",
    ],
    "training": [
        "mmkit.training.Processor",
        "mmkit.training.Collator",
        "mmkit.training.MultiModalMixin",
    ],
}
"""The names whose docstrings stand at the end of each page of the reference, for mkdocstrings."""

RELEASES = "<!-- towncrier: releases go below this line -->\n"
"""What stands in the changelog before its newest release."""

BUTTONS = "<!-- buttons -->\n"
"""The links of the line after this comment are buttons in the site."""

_CODE_OR_LINK = re.compile(
    r"^ *(?P<fence>```+|~~~+)(?s:.*?)^ *(?P=fence)[`~]* *$"
    r"|(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE,
)
_OUTSIDE = re.compile(r"[a-z][a-z+.-]*:|#|/")


def on_config(config: Any) -> Any:
    """Give the site the address of the repository, where there is one."""
    if read_repository():
        config.repo_url = read_repository()
    return config


def read_repository() -> str:
    """Return the address of the repository; empty while there is none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere."""
    for source, uri in ELSEWHERE.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        if source == "CHANGELOG.md":
            content = _add_unreleased(content)
        files.append(File.generated(config, uri, content=content))
    return files


def _add_unreleased(changelog: str) -> str:
    """Return the changelog with the fragments of changes that no release has yet."""
    kinds = {"added": [], "changed": [], "fixed": [], "removed": []}
    for path in sorted((ROOT / "changelog.d").glob("*.*.md")):
        text = path.read_text(encoding="utf-8").strip().removeprefix("- ")
        kinds[path.name.split(".")[1]].append("- " + text.replace("\n", "\n  "))
    parts = []
    for kind, entries in kinds.items():
        if entries:
            parts.append("\n".join([f"### {kind.title()}", "", *entries, ""]))
    if not parts:
        return changelog
    before, _, releases = changelog.partition(RELEASES)
    return before + "\n".join(["## Unreleased", "", *parts]) + releases


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return a page for the site: its links, buttons and docstrings.

    What is in a fenced block stays as it is.
    """
    uri = page.file.src_uri
    markdown = _make_buttons(markdown)
    if uri.startswith("data/"):
        page.meta["search"] = {"exclude": True}  # what programs write is linked, not searched
    home = next((source for source, target in ELSEWHERE.items() if target == uri), f"docs/{uri}")

    def changed(match: re.Match[str]) -> str:
        if match["fence"]:
            return match[0]
        target = site_link(match["target"], home, uri)
        return match["text"] if target is None else f"[{match['text']}]({target})"

    page_text = _CODE_OR_LINK.sub(changed, markdown) + _write_docstrings(uri)
    if uri == "messages.md":
        page_text += "\n" + write_messages()
    return page_text


def _make_buttons(markdown: str) -> str:
    before, comment, after = markdown.partition(BUTTONS)
    if not comment:
        return markdown
    line, newline, rest = after.partition("\n")
    buttons = line.replace(")", "){ .md-button }")
    return before + buttons + newline + rest


def _write_docstrings(uri: str) -> str:
    """Return the end of a page of the reference."""
    name = uri.removeprefix("reference/").removesuffix(".md")
    if name not in DOCSTRINGS:
        return ""
    blocks = [f"::: {identifier}" for identifier in DOCSTRINGS[name]]
    return "\n\n".join(["\n\n## Signatures", *blocks]) + "\n"


def site_link(target: str, home: str, uri: str) -> str | None:
    """Return a link as it is in the site.

    A file of the repository that is not part of the site has its address there. Return None while
    the repository has no address.

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
        repository = read_repository()
        if not repository:
            return None
        return f"{repository}/blob/main/{path}{hash_sign}{anchor}"
    else:
        return target  # for the validation to complain about
    return posixpath.relpath(path, posixpath.dirname(uri) or ".") + hash_sign + anchor
