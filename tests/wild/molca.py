"""MolCA at f728a47: data_provider/stage2_dm.py, data_provider/molecule_caption_dataset.py, model/blip2_opt.py.

Between `[START_I_SMILES]` and `[END_I_SMILES]` stand the first 128 letters of the SMILES, which are tokenized one by
one, and behind them eight `<mol>`, whose embeddings are replaced by the rows of a Q-Former. The language model is
Galactica, an OPT whose tokenizer adds nothing to a text.
"""

from __future__ import annotations

import random
import re
from typing import Any

import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

from examples.wild.molca import MOLCA
from mmkit.training import MultiModalMixin

from .common import (
    SIZES,
    Expansion,
    Message,
    WildModel,
    collect_items,
    draw_text,
    make_byte_tokenizer,
    make_item_part,
    make_message,
    make_text_part,
)

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<molecule>' }}{% endfor %}{% endfor %}"
)
"""The prompt is the text."""


class MolcaConfig(OPTConfig):
    """Galactica's, and what the published code has as arguments."""

    model_type = "wild_molca"

    num_query_token: int = 8
    max_smiles: int = 200
    max_atoms: int = 12
    max_bonds: int = 20


class MolcaForCausalLM(MultiModalMixin, OPTForCausalLM):
    """An OPT, with an encoder of graphs and queries."""

    mm_spec = MOLCA
    config_class = MolcaConfig

    def __init__(self, config: MolcaConfig) -> None:
        super().__init__(config)
        self.atoms = nn.Linear(9, config.hidden_size)
        self.bonds = nn.Linear(3, config.hidden_size)
        self.queries = nn.Parameter(torch.randn(config.num_query_token, config.hidden_size))
        self.post_init()

    def embed_molecule(self, atoms: Any, bonds: Any, bond_features: Any) -> list[torch.Tensor]:
        """Encode molecules to rows (num_query_token, hidden_size): atoms with their neighbours, read by queries."""
        rows = []
        for nodes, pairs, features in zip(atoms, bonds, bond_features, strict=True):
            states = self.atoms(nodes.to(self.queries.dtype))
            messages = states[pairs[0]] + self.bonds(features.to(self.queries.dtype))
            states = states.index_add(0, pairs[1], messages)
            weights = (self.queries @ states.T / 8).softmax(-1)
            rows.append(weights @ states)
        return rows


def make_tokenizer() -> Any:
    special = ["</s>", "[START_I_SMILES]", "[END_I_SMILES]", "<mol>", "<molecule>"]
    return make_byte_tokenizer(special, TEMPLATE, eos="</s>")


def draw(rng: random.Random) -> list[Message]:
    """Draw one or two molecules among texts; their graphs are any."""
    parts = [make_text_part("The SMILES of this molecule is " + draw_text(rng))]
    for _ in range(rng.randint(1, 2)):
        generator = torch.Generator().manual_seed(rng.randrange(1000))
        atoms = torch.randint(0, 5, (rng.choice([1, 2, 11, 12]), 9), generator=generator)
        bonds = torch.randint(0, len(atoms), (2, rng.choice([0, 1, 20])), generator=generator)
        molecule = {
            "smiles": "".join(rng.choices("CNOcno()=#123[]@+-/\\", k=rng.choice([1, 2, 9, 127, 128, 129, 200]))),
            "atoms": atoms,
            "bonds": bonds,
            "bond_features": torch.randint(0, 4, (bonds.shape[1], 3), generator=generator),
        }
        parts.append(make_item_part("molecule", molecule))
        parts.append(make_text_part(". " + draw_text(rng)))
    return [make_message("user", *parts)]


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what MolCA makes of a chat."""
    (message,) = messages
    molecules = collect_items(messages)["molecule"]
    prompt = ""
    for part in message["content"]:
        if part["type"] == "text":
            prompt += part["text"]
        else:
            smiles = part["molecule"]["smiles"][:128]
            prompt += f"[START_I_SMILES]{smiles}[END_I_SMILES]" + "<mol>" * config.num_query_token

    expansion = Expansion()
    graphs = iter(molecules)
    row = tokenizer.convert_tokens_to_ids("<mol>")
    # texts, and the letters between the two tokens, in turns
    pieces = re.split(r"\[START_I_SMILES\](.*?)\[END_I_SMILES\]", prompt)
    for number, piece in enumerate(pieces):
        if number % 2:
            expansion.add_ids(tokenizer("[START_I_SMILES]").input_ids)
            for letter in piece:
                expansion.add_ids(tokenizer(letter).input_ids)
            expansion.add_ids(tokenizer("[END_I_SMILES]").input_ids)
            graph = dict(next(graphs))
            del graph["smiles"]
            expansion.add_item("molecule", **graph)
            continue
        expansion.add_tokens(tokenizer(piece).input_ids, row)
    return expansion


def make_config(vocab_size: int) -> MolcaConfig:
    sizes = {"ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.3, "bos_token_id": 0, "eos_token_id": 2}
    return MolcaConfig(vocab_size=vocab_size, **SIZES, **sizes)


MODEL = WildModel(MOLCA, "MolcaForCausalLM", make_tokenizer, make_config, draw, expand)
