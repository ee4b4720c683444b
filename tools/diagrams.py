"""Draw the diagrams of the pages: ``python -m tools.diagrams``.

Of docs/images, architecture.svg shows what an author writes and what mmkit makes of it, request.svg
how a request passes through a server, and prompt.svg what an item becomes in a prompt.
"""

from __future__ import annotations

from html import escape

from .shared import ROOT

IMAGES = ROOT / "docs" / "images"

WIDTH = 688
"""Of the column of the site, in pixels."""

STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.small{font-size:12px}.b{font-weight:600}"
    "rect{fill:#f6f8fa;stroke:#8c959f}rect.yours{fill:#ddf4ff;stroke:#0969da}"
    "path,line{stroke:#57606a;fill:none}.head{fill:#57606a}.life{stroke:#d0d7de}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}rect{fill:#161b22;stroke:#6e7681}"
    "rect.yours{fill:#0c2d6b;stroke:#58a6ff}path,line{stroke:#8b949e}.head{fill:#8b949e}"
    ".life{stroke:#30363d}}"
)

ACTORS = ["client", "server: mmkit", "server: plan", "engine: vLLM", "your model"]
"""Who takes part in a request, from left to right."""

CALLS = [
    (0, 1, "a chat message with an item"),
    (1, 2, "1 parse: check the item"),
    (2, 2, "2, 3, 4 check ids, hash, look up"),
    (2, 2, "5 process what the cache lacks"),
    (2, 2, "6, 7 lay out, place in the prompt"),
    (2, 1, "8 ids, ranges, fields"),
    (1, 1, "9 admit: every id and item is known"),
    (1, 3, "10 ids, and fields that are new"),
    (3, 4, "11 embed_series(fields)"),
    (4, 3, "rows of embeddings"),
    (3, 3, "sample no placeholder"),
    (3, 0, "tokens, as a stream"),
]
"""Who calls whom with what, with the steps of docs/how-it-works.md. A call to oneself is a step."""


def main() -> None:
    for name, text in draw_all().items():
        (IMAGES / name).write_text(text, encoding="utf-8")


def draw_all() -> dict[str, str]:
    """Return the pictures, by the names of their files."""
    return {
        "architecture.svg": draw_architecture(),
        "prompt.svg": draw_prompt(),
        "request.svg": draw_request(),
    }


def draw_architecture() -> str:
    parts = [
        _draw_box(24, 20, 300, ["spec.py", "items, layout, update, fields"], yours=True),
        _draw_box(364, 20, 300, ["model.py", "language model and encoder"], yours=True),
        _draw_box(24, 150, 300, ["plan", "the spec with a config and a tokenizer"]),
        _draw_box(
            24, 280, 300, ["processor and collator", "for training with transformers: the same ids"]
        ),
        _draw_box(364, 280, 300, ["three processor classes", "for vLLM: offline, HTTP, sessions"]),
        _draw_box(24, 410, 300, ["checkpoint", "trained weights, config, tokenizer"]),
        _draw_box(364, 410, 300, ["vLLM", "scheduler, caches, kernels, server"]),
        _draw_arrow(174, 76, 174, 150, "bind"),
        _draw_arrow(174, 206, 174, 280, ""),
        _draw_arrow(324, 190, 440, 280, ""),
        _draw_arrow(600, 76, 600, 280, "the same class is trained and served", left=True),
        _draw_arrow(174, 336, 174, 410, "train"),
        _draw_arrow(514, 336, 514, 410, ""),
        _draw_arrow(324, 438, 364, 438, ""),
        '<text class="small" x="24" y="494">Blue: what you write. The rest is mmkit, vLLM and'
        " transformers.</text>",
    ]
    return _draw_picture(510, parts)


def draw_prompt() -> str:
    parts = [
        _draw_tokens(54, "prompt of the caller", ["<series>", "is", "a"], blue=["<series>"]),
        '<text class="small" x="212" y="22">target</text>',
        _draw_arrow(236, 72, 236, 112, "update: replace the target by the layout"),
        _draw_tokens(
            142,
            "prompt of the model",
            ["<patch>", "<patch>", "<patch>", "is", "a"],
            blue=["<patch>"],
        ),
        '<text class="small" x="556" y="128">placeholders:</text>',
        '<text class="small" x="556" y="145">one row each</text>',
        _draw_arrow(236, 208, 236, 162, ""),
        _draw_arrow(320, 208, 320, 162, ""),
        _draw_arrow(404, 208, 404, 162, ""),
        '<text class="small" x="12" y="226">item of the caller</text>',
        '<text class="small" x="200" y="226">9 steps: field, encoder, 3 rows</text>',
    ]
    return _draw_picture(244, parts)


def draw_request() -> str:
    step = 34
    top = 66
    height = top + step * len(CALLS) + 10
    places = [60 + 142 * index for index in range(len(ACTORS))]
    parts = []
    for x, actor in zip(places, ACTORS, strict=True):
        parts.append(f'<line class="life" x1="{x}" y1="40" x2="{x}" y2="{height - 8}"/>')
        parts.append(f'<text class="b" x="{x}" y="28" text-anchor="middle">{actor}</text>')
    for index, (start, end, label) in enumerate(CALLS):
        y = top + step * index
        if start == end:
            x = places[start]
            parts.append(f'<path d="M{x} {y - 8}h18v14h-14"/>')
            parts.append(_draw_head(x + 2, y + 6, left=True))
            parts.append(f'<text class="small" x="{x + 26}" y="{y + 3}">{escape(label)}</text>')
        else:
            left = min(places[start], places[end])
            parts.append(f'<line x1="{places[start]}" y1="{y}" x2="{places[end]}" y2="{y}"/>')
            parts.append(_draw_head(places[end], y, left=end < start))
            parts.append(f'<text class="small" x="{left + 10}" y="{y - 5}">{escape(label)}</text>')
    return _draw_picture(height, parts)


def _draw_picture(height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
    return "\n".join([f'{head} width="{WIDTH}">', f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def _draw_tokens(y: int, label: str, tokens: list[str], blue: list[str]) -> str:
    """Return a row of tokens with a label before it; `y` is its middle."""
    parts = [f'<text class="small" x="12" y="{y + 4}">{escape(label)}</text>']
    x = 200
    for token in tokens:
        kind = ' class="yours"' if token in blue else ""
        width = 72 if len(token) > 2 else 36
        parts.append(f'<rect{kind} x="{x}" y="{y - 17}" width="{width}" height="34" rx="4"/>')
        middle = x + width // 2
        shown = escape(token)
        parts.append(f'<text x="{middle}" y="{y + 5}" text-anchor="middle">{shown}</text>')
        x += width + 12
    return "".join(parts)


def _draw_box(x: int, y: int, width: int, lines: list[str], yours: bool = False) -> str:
    """Return a box of a title and a line below it."""
    title, text = lines
    kind = ' class="yours"' if yours else ""
    middle = x + width // 2
    return (
        f'<rect{kind} x="{x}" y="{y}" width="{width}" height="56" rx="6"/>'
        f'<text class="b" x="{middle}" y="{y + 24}" text-anchor="middle">{escape(title)}</text>'
        f'<text class="small" x="{middle}" y="{y + 43}" text-anchor="middle">{escape(text)}</text>'
    )


def _draw_arrow(x1: int, y1: int, x2: int, y2: int, label: str, left: bool = False) -> str:
    """Return an arrow with its label beside it."""
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'
    if x1 == x2:
        head = f'<path class="head" d="M{x2} {y2}l-4 -8h8z"/>'
    elif y1 == y2:
        head = _draw_head(x2, y2)
    else:
        head = f'<path class="head" d="M{x2} {y2}l-9 -2l5 -6z"/>'
    anchor = "end" if left else "start"
    x = x1 - 10 if left else x1 + 10
    y = (y1 + y2) // 2 + 4
    text = f'<text class="small" x="{x}" y="{y}" text-anchor="{anchor}">{escape(label)}</text>'
    return line + head + (text if label else "")


def _draw_head(x: int, y: int, left: bool = False) -> str:
    """Return the head of an arrow that points to the right, or to the left."""
    back = 8 if left else -8
    return f'<path class="head" d="M{x} {y}l{back} -4v8z"/>'


if __name__ == "__main__":
    main()
