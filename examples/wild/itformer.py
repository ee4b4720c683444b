"""ITFormer answers questions about the sensors of a machine; which rows it makes of a series depends on the question.

Source: https://github.com/Pandalin98/ITFormer-ICML25 at b80142f, paper arXiv 2506.20093, MIT.

The question stands in the prompt, and its ids are read by the encoder too. So the question is a part of the item, and a
caller sends it twice; the item's hash covers it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mmkit import Modality, ModelSpec, Record, Scope, Tensor, Text, batched, between, cfg


def read_questions(items: Sequence[Mapping[str, Any]], scope: Scope) -> dict[str, list[torch.Tensor]]:
    """Return series, the stages of the task, and the ids of the questions."""
    questions = [torch.tensor(scope.tok.text("{}", each_item["question"])) for each_item in items]
    return {
        "ts_values": [each_item["series"] for each_item in items],
        "query_ids": questions,
        "stage": [each_item["stage"] for each_item in items],
    }


ITFORMER = ModelSpec(
    "itformer",
    Modality(
        "ts",
        item=Record(
            series=Tensor((between(1, cfg.max_steps), cfg.channels)),
            question=Text(cfg.max_question),
            stage=Tensor((), "int64", bound=between(1, 4)),
        ),
        process=read_questions,
        fields={"ts_values": batched(), "query_ids": batched(dtype="int64"), "stage": batched()},
        # the published code borrows the token of images
        placeholder="<|image_pad|>",
        tokens=cfg.ts_pad_num,
        limit=1,
    ),
)
