"""A spec bound to the JSON files of a checkpoint, by the package tokenizers alone.

It takes specs that read the config, the tokenizer and attributes of the processor; others call code of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

from mmkit import ModelSpec
from mmkit.plan.plan import Plan


class Config(SimpleNamespace):
    """A config, with its nested ones as attributes."""

    def get_text_config(self) -> Any:
        return getattr(self, "text_config", self)


class Texts:
    """What mmkit asks of a tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = self.tokenizer.get_added_tokens_decoder()
        self.added = {token.content: number for number, token in added.items()}
        self.all_special_ids = [number for number, token in added.items() if token.special]
        names = json.loads((folder / "tokenizer_config.json").read_text())
        for kind in ("bos", "eos", "unk"):
            text = names.get(f"{kind}_token")
            if isinstance(text, dict):
                text = text["content"]
            setattr(self, f"{kind}_token_id", text and self.tokenizer.token_to_id(text))

    def get_vocab(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()  # type: ignore[no-any-return]

    def get_added_vocab(self) -> dict[str, int]:
        return self.added

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids  # type: ignore[no-any-return]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]


def bind_to_files(spec: ModelSpec, folder: Path) -> Plan:
    """Bind a spec to the config, the tokenizer and the processor that the files of a checkpoint describe."""
    config = json.loads((folder / "config.json").read_text(), object_hook=lambda values: Config(**values))
    processor: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).exists():
            processor |= json.loads((folder / name).read_text())
    return spec.bind(config, Texts(folder), processor=processor)
