"""What the pages of the survey state, and how a violation is recognised as a stated finding.

The pages are docs/data/laws-on-vllm.md, that of its findings, and that of the Transformers backend.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).parents[2] / "docs" / "data" / "laws-on-vllm.md"
FINDINGS = PATH.with_name("laws-on-vllm-findings.md")
BACKEND = PATH.with_name("laws-on-transformers.md")

PATTERNS = {
    1: r"^idempotence: .*(\d+ ids became \d+|refused with|have other lengths)",
    2: r"one item of \w+ too few: accepted",
    3: r"in two processes: MultiModalCacheMissError",
    4: r"the same content as (ndarray|Image) has another",
    5: r"embeddings of \w+ pass the parser, then ValueError: Failed to apply",
    6: r"pass the parser, then RuntimeError: Expected there to be \d+ \w+ items in keyword "
    r"arguments",
    7: r"pass the parser, then (KeyError|IndexError|AttributeError|TypeError: 'int' object)",
    8: r"embeddings of video pass the parser, then TypeError: (can't multiply|unsupported operand)",
    9: r"RuntimeError: Expected there to be \d+ prompt placeholders",
    10: r"the ids at \w+\[\d+\] are|begins inside the range before it|outside the ranges|"
    r"the Hugging Face processor and vLLM, of .*\\n",
    11: r"outside the ranges",
    12: r"outside the ranges",
    13: r"IndexError: index -1 is out of bounds|the Hugging Face processor and vLLM, of .*: ids: |"
    r"^(?!names).*\['(spatial_shapes|pixel_values|pixel_attention_mask)'\]",
    14: r"has an item of \d+ rows",
    15: r"has an item of \d+ rows",
    16: r"video has an item of \d+ rows",
    17: r"rows are stated for \w+, and the dummy item has \d\d",
    18: r"expected sequence of length \d+ at dim",
    19: r"\['pixel_values'\]: torch.float32|^doors: options of a request|^reference: .*: ids: ",
    20: r"\['(pixel_values(_flat)?|images_spatial_crop|image_num_patches)'\]|embed positions alone "
    r"and",
    21: r"\['(pixel_values|audio_features)'\]",
    22: r"\['image_input_idx'\]",
    23: r"\['input_audio_features'\]: values differ",
    24: r"^doors: options of a request and, for the \w+ request, of the server",
    25: r"embeddings of audio pass the parser, then KeyError: \"Modality 'image' not found",
    26: r"AssertionError: Expected a cached item for mm_hash",
    27: r"rows are stated for audio, and the dummy item has \d\b",
    28: r"without names and under those that (other items had|it had with other kwargs)",
    29: r"^positions: .*(the token after the prompt is at|token \d+ is at .* and in )",
    30: r"Position ids length mismatch with input ids length",
    31: r"the Hugging Face processor and vLLM, of ",
    32: r"^doors: options of a request and, for the \w+ request, of the server",
    33: r"^doors: options of a request and, for the \w+ request, of the server",
    34: r"the Hugging Face processor and vLLM, of .*: ids: ",
    36: r"\['pixel_values'\]: (values|.* and torch.float32 \(\d+, 1,)|"
    r"'pixel_values' has other values",
    37: r"InternVLProcessor returned .* cannot be split into",
    38: r"has no attribute '_get_num_multimodal_tokens'|(Llama4|MiniCPMV4_6)Processor returned |"
    r"'target_sizes' before and after|^cache: .*: ids: |torch.float32 \(1, 3, 14, 224\)",
    39: r"FlakyStrategyDefinition|unexpected keyword argument 'min_pixels'",
    40: r"the field 'second_per_grid_ts' has other values",
    41: r"the Hugging Face processor and vLLM, of .*: ids: ",
    42: r"\['labels'\]: ",
    43: r"Failed to apply LlavaOnevisionProcessor",
    44: r"Failed to apply AudioFlamingo3Processor",
    45: r"has an item of \d+ rows",
    46: r"rows are stated for \w+, and the dummy item has \d",
    47: r"Unable to get max input length from|row\(s\) of `pixel_values_videos`",
    48: r"Cannot merge different batch sizes for modality",
    49: r"the Hugging Face processor and vLLM, of .*: ids: ",
    50: r"the Hugging Face processor and vLLM, of .*: ids: ",
    51: r"the field 'pixel_values_videos' has other values",
}
"""Of messages, for `re.search`, by finding. There is none for what no law without a model sees."""


@dataclass(frozen=True)
class Page:
    """The tables of the page.

    Attributes:
        laws: those that can show a finding.
        everywhere: findings about all models.
        entries: findings of each entry, those in parentheses included.
        cells: findings by entry and law, without those in parentheses.
    """

    laws: dict[int, set[str]]
    everywhere: set[int]
    entries: dict[str, set[int]]
    cells: dict[tuple[str, str], set[int]]

    def find(self, entry: str, law: str, message: str) -> int | None:
        """Return the number of the finding that a violation is one of."""
        findings = self.everywhere | self.entries.get(entry, set())
        for number in sorted(findings & PATTERNS.keys()):
            if law in self.laws[number] and re.search(PATTERNS[number], message):
                return number
        return None


def read_page() -> Page:
    """Return the tables of both pages, and the findings about all models."""
    rows = _read_rows(PATH.read_text() + BACKEND.read_text())
    laws = {}
    for row in rows:
        if row[0][0].isdigit():
            number = int(row[0].split()[0])
            laws[number] = set(row[2].split(", "))
    entries = {}
    cells = {}
    head: list[str] = []
    for row in rows:
        if row[0] == "entry":
            head = row
        elif head and len(row) == len(head):
            entry = row[0]
            entries[entry] = {int(number) for number in re.findall(r"\d+", " ".join(row[1:]))}
            for law, cell in zip(head[1:], row[1:], strict=True):
                numbers = re.findall(r"(?<![\d(])\d+", cell)
                cells[entry, law] = {int(number) for number in numbers}
    return Page(laws, _read_findings_everywhere(), entries, cells)


def _read_rows(text: str) -> list[list[str]]:
    """Return the cells of all tables, without the lines of dashes."""
    rows = []
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def _read_findings_everywhere() -> set[int]:
    """Return the numbers of the findings about all models."""
    text = FINDINGS.read_text()
    section = text.split("\n## All models\n")[1].split("\n## ")[0]
    return {int(number) for number in re.findall(r"^### (\d+)\.", section, re.MULTILINE)}
