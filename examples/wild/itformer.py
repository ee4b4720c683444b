"""ITFormer answers questions about the sensors of a machine; which rows it makes of a series depends on the question.

Source: https://github.com/Pandalin98/ITFormer-ICML25 at b80142f, paper arXiv 2506.20093, MIT.

The question stands in the prompt, and its ids are read by the encoder too. So the question is a part of the item, and a
caller sends it twice; the item's hash covers it.
"""

from mmkit import Modality, ModelSpec, Record, Tensor, Text, batched, between, cfg, derived, identity, item, tok

ITFORMER = ModelSpec(
    "itformer",
    Modality(
        "ts",
        item=Record(
            ts_values=Tensor((between(1, cfg.max_steps), cfg.channels)),
            question=Text(cfg.max_question),
            stage=Tensor((), "int64", bound=between(1, 4)),
        ),
        process=identity(),
        fields={
            "ts_values": batched(),
            "stage": batched(),
            "query_ids": derived(tok.text("{}", item.question.text), dtype="int64"),
        },
        # the published code borrows the token of images
        placeholder="<|image_pad|>",
        tokens=cfg.ts_pad_num,
        limit=1,
    ),
)
