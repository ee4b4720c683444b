"""MolCA reads a molecule, as the letters of its SMILES and as a graph, and describes it.

Source: https://github.com/acharkq/MolCA at f728a47, paper arXiv 2310.12798. The repository has no licence file.

The letters stand in the prompt, each by itself, as the language model (Galactica) was trained. Behind them stand the
rows of a Q-Former, which reads the graph.
"""

from mmkit import (
    Modality,
    ModelSpec,
    Record,
    Tensor,
    Text,
    batched,
    between,
    cfg,
    each,
    embed,
    identity,
    item,
    later,
    replace,
    tok,
)

MAX_LETTERS = 128
"""Longer SMILES are cut off in the prompt; the graph is whole."""

LETTERS = later(list)(item.smiles.text[:MAX_LETTERS])

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
        # the encoder reads the graph, as RDKit makes it; the letters are for the layout
        process=identity(),
        fields={"atoms": batched(), "bonds": batched(), "bond_features": batched()},
        layout=tok["[START_I_SMILES]"]
        + each(LETTERS, lambda letter: tok.text("{}", letter))
        + tok["[END_I_SMILES]"]
        + embed(tok["<mol>"]) * cfg.num_query_token,
        update=replace(tok["<molecule>"]),
    ),
)
