"""3D-MoLM at fb03ba3: data_provider/stage2_dm.py, data_provider/unimol_dataset.py, model/blip2_llama.py.

The prompt has eight `<mol>` behind the SMILES, and begins with `</s>`, which the published code makes the first token
of every text. Hydrogens are left out, the atoms are moved around zero, and one more stands before and one behind them.
The published code leaves out atoms by chance where there are too many; here such a molecule is refused.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.wild.molm_3d import MOLM_3D
from mmkit.training import MultiModalMixin

from .common import (
    SIZES,
    Expansion,
    Message,
    WildModel,
    collect_items,
    draw_text,
    join_parts,
    make_item_part,
    make_llama_tokenizer,
    make_message,
    make_text_part,
)

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<mol>' * 8 }}{% endfor %}{% endfor %}"
)
HYDROGEN = 7


class Molm3DConfig(LlamaConfig):
    """A Llama's, and what the published code has in the dictionary of Uni-Mol and as arguments."""

    model_type = "wild_molm_3d"

    num_query_token: int = 8
    max_atoms: int = 20
    num_atoms: int = 10
    first_atom: int = 1
    last_atom: int = 2
    hydrogen: int = HYDROGEN


class Molm3DForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama, with an encoder of atoms and their distances, and queries."""

    mm_spec = MOLM_3D
    config_class = Molm3DConfig

    def __init__(self, config: Molm3DConfig) -> None:
        super().__init__(config)
        self.atoms = nn.Embedding(config.num_atoms, config.hidden_size)
        self.kinds = nn.Embedding(config.num_atoms**2, 1)
        self.queries = nn.Parameter(torch.randn(config.num_query_token, config.hidden_size))
        self.post_init()

    def embed_conformer(self, atoms: Any, kinds: Any, distances: Any) -> list[torch.Tensor]:
        """Encode molecules to rows (num_query_token, hidden_size)."""
        rows = []
        for ids, pairs, lengths in zip(atoms, kinds, distances, strict=True):
            near = (self.kinds(pairs)[..., 0] - lengths).softmax(-1)
            states = near @ self.atoms(ids)
            rows.append((self.queries @ states.T / 8).softmax(-1) @ states + self.queries / 2)
        return rows


def make_tokenizer() -> Any:
    return make_llama_tokenizer(["<mol>"], TEMPLATE, bos="</s>")


def draw(rng: random.Random) -> list[Message]:
    """Draw the published instruction about one or two molecules, now and then of hydrogens only."""
    parts = []
    for _ in range(rng.randint(1, 2)):
        state = np.random.RandomState(rng.randrange(1000))
        atoms = state.randint(3, 10, rng.choice([1, 2, 5, 19, 20]))
        if rng.random() < 0.1:
            atoms[:] = HYDROGEN
        molecule = {"atoms": atoms, "coordinates": state.randn(len(atoms), 3).astype(np.float32) * 3}
        parts.append(make_text_part("Instruction: " + draw_text(rng) + "\nInput molecule: CCO "))
        parts.append(make_item_part("conformer", molecule))
    parts.append(make_text_part(".\nResponse: "))
    return [make_message("user", *parts)]


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what 3D-MoLM makes of an instruction."""
    expansion = Expansion()
    molecules = iter(collect_items(messages)["conformer"])
    mol = tokenizer.convert_tokens_to_ids("<mol>")
    num_rows = 0
    for token in tokenizer(join_parts(messages[0], {"conformer": "<mol>" * 8})).input_ids:
        if token != mol:
            expansion.add_ids([token])
            continue
        if num_rows % 8 == 0:
            expansion.add_item("conformer", **read_molecule(next(molecules), config))
        expansion.add_rows(1, mol)
        num_rows += 1
    return expansion


def read_molecule(molecule: dict[str, Any], config: Any) -> dict[str, torch.Tensor]:
    atoms = molecule["atoms"]
    places = molecule["coordinates"]
    if np.any(atoms != HYDROGEN):
        places = places[atoms != HYDROGEN]
        atoms = atoms[atoms != HYDROGEN]
    places = places - places.mean(axis=0)
    places = np.vstack([np.zeros(3), places, np.zeros(3)])
    atoms = [config.first_atom, *atoms.tolist(), config.last_atom]
    kinds = [[first * config.num_atoms + second for second in atoms] for first in atoms]
    distances = [[float(np.sqrt(np.sum((first - second) ** 2))) for second in places] for first in places]
    return {"atoms": torch.tensor(atoms), "kinds": torch.tensor(kinds), "distances": torch.tensor(distances)}


def make_config(vocab_size: int) -> Molm3DConfig:
    return Molm3DConfig(vocab_size=vocab_size, **SIZES)


MODEL = WildModel(MOLM_3D, "Molm3DForCausalLM", make_tokenizer, make_config, draw, expand)
