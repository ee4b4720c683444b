"""What docs/data/laws-on-vllm.md, the page of its findings and that of the Transformers backend
state, and how a violation is told to be one of them."""

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

    def finding(self, entry: str, law: str, message: str) -> int | None:
        """The finding that a violation is one of."""
        known = self.everywhere | self.entries.get(entry, set())
        numbers = (n for n in sorted(known & PATTERNS.keys()) if law in self.laws[n])
        return next((n for n in numbers if re.search(PATTERNS[n], message)), None)


def read() -> Page:
    text = PATH.read_text() + BACKEND.read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith("| ---")
    ]
    laws = {int(row[0].split()[0]): {*row[2].split(", ")} for row in rows if row[0][0].isdigit()}
    _, shared = FINDINGS.read_text().split("\n## All models\n")
    shared, *_ = shared.split("\n## ")
    everywhere = {int(n) for n in re.findall(r"^### (\d+)\.", shared, re.MULTILINE)}
    head = next(row for row in rows if row[0] == "entry")
    below = [row for row in rows[rows.index(head) :] if len(row) == len(head) and row != head]
    entries = {row[0]: {int(n) for n in re.findall(r"\d+", " ".join(row[1:]))} for row in below}
    cells = {
        (row[0], law): {int(n) for n in re.findall(r"(?<![\d(])\d+", cell)}
        for row in below
        for law, cell in zip(head[1:], row[1:], strict=True)
    }
    return Page(laws, everywhere, entries, cells)
