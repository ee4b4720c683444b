"""3D-MoLM reads a molecule as its atoms in space, and answers questions about its properties.

Source: https://github.com/lsh0520/3D-MoLM at fb03ba3, paper arXiv 2401.13923. The repository has no licence file.

The encoder, Uni-Mol, reads kinds of atoms and distances. The prompt holds the placeholders of a molecule already.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mmkit import Modality, ModelSpec, Record, Scope, Tensor, already_expanded, batched, between, cfg, item


def measure(items: Sequence[Mapping[str, Any]], scope: Scope) -> dict[str, list[torch.Tensor]]:
    """Return the atoms (n + 2,) without hydrogens, between a first and a last one that stand at the centre, and for
    each pair of them its kind and its distance (n + 2, n + 2)."""
    columns: dict[str, list[torch.Tensor]] = {"atoms": [], "kinds": [], "distances": []}
    for molecule in items:
        atoms = molecule["atoms"]
        places = molecule["coordinates"]
        is_heavy = atoms != scope.cfg.hydrogen
        if is_heavy.any():
            atoms = atoms[is_heavy]
            places = places[is_heavy]
        places = places - places.mean(0)
        centre = torch.zeros(1, 3)
        ends = torch.tensor([scope.cfg.first_atom, scope.cfg.last_atom])
        atoms = torch.cat([ends[:1], atoms, ends[1:]])
        places = torch.cat([centre, places, centre])
        columns["atoms"].append(atoms)
        columns["kinds"].append(atoms[:, None] * scope.cfg.num_atoms + atoms)
        columns["distances"].append(torch.linalg.vector_norm(places[:, None] - places, dim=-1))
    return columns


MOLM_3D = ModelSpec(
    "molm_3d",
    Modality(
        "conformer",
        # indices into the dictionary of atoms, and coordinates in angstrom
        item=Record(
            atoms=Tensor((between(1, cfg.max_atoms),), "int64", bound=between(0, cfg.num_atoms - 1)),
            coordinates=Tensor((item.atoms.length, 3), bound=1e3),
        ),
        process=measure,
        fields={"atoms": batched(), "kinds": batched(dtype="int64"), "distances": batched(dtype="float32")},
        placeholder="<mol>",
        tokens=cfg.num_query_token,
        update=already_expanded(),
    ),
)
