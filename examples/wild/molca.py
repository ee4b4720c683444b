"""MolCA reads a molecule, as the letters of its SMILES and as a graph, and describes it.

Source: https://github.com/acharkq/MolCA at f728a47, paper arXiv 2310.12798. The repository has no licence file.

The letters stand in the prompt, each by itself, as the language model (Galactica) was trained. Behind them stand the
rows of a Q-Former, which reads the graph.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mmkit import (
    Modality,
    ModelSpec,
    Record,
    Scope,
    Tensor,
    Text,
    batched,
    between,
    cfg,
    each,
    embed,
    item,
    later,
    replace,
    tok,
)

MAX_LETTERS = 128
"""Longer SMILES are cut off in the prompt; the graph is whole."""


def cut(smiles: str) -> list[str]:
    """Return the letters that stand in the prompt."""
    return list(smiles[:MAX_LETTERS])


def take_graph(items: Sequence[Mapping[str, Any]], scope: Scope) -> dict[str, list[Any]]:
    """Return the graphs of molecules, as RDKit makes them: what the encoder reads."""
    return {name: [molecule[name] for molecule in items] for name in ("atoms", "bonds", "bond_features")}


LETTERS = later(cut)(item.smiles.text)

MOLCA = ModelSpec(
    "molca",
    Modality(
        "molecule",
        item=Record(
            smiles=Text(cfg.max_smiles),
            atoms=Tensor((between(1, cfg.max_atoms), 9), "int64"),
            bonds=Tensor((2, between(0, cfg.max_bonds)), "int64", bound=between(0, item.atoms.length - 1)),
            bond_features=Tensor((item.bonds.shape[1], 3), "int64"),
        ),
        process=take_graph,
        fields={"atoms": batched(), "bonds": batched(), "bond_features": batched()},
        layout=tok["[START_I_SMILES]"]
        + each(LETTERS, lambda letter: tok.text("{}", letter))
        + tok["[END_I_SMILES]"]
        + embed(tok["<mol>"]) * cfg.num_query_token,
        update=replace(tok["<molecule>"]),
    ),
)
