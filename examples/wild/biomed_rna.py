"""Biomed RNA makes a vector of a cell, from which genes it expresses and how much; there is no text.

Source: https://github.com/BiomedSciAI/biomed-multi-omic at 78d2ba1, a plugin of IBM for vLLM, Apache 2.0.

The plugin pads cells and has a mask beside them. A spec needs neither: the model gets each cell at its own length.
"""

from mmkit import Modality, ModelSpec, Record, Scope, Tensor, batched, between, cfg, item


def find_last_gene(scope: Scope) -> int:
    """Return the last number of a gene."""
    for field in scope.cfg.fields:
        if field.field_name == "genes":
            last: int = field.vocab_size - 1
            return last
    raise AttributeError("config.fields has no field 'genes'")


BIOMED_RNA = ModelSpec(
    "biomed_rna",
    Modality(
        "rna",
        item=Record(
            gene_ids=Tensor((between(1, cfg.max_genes),), "int64", bound=between(0, find_last_gene)),
            expr_values=Tensor((item.gene_ids.length,)),
        ),
        fields={"gene_ids": batched(), "expr_values": batched()},
        # nothing stands for a cell in the prompt; the model's forward gets the fields
        tokens=0,
        limit=1,
    ),
)
