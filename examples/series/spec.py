"""The multimodal side of the model, all of it."""

from collections.abc import Sequence

import torch

from mmkit import Modality, ModelSpec, Scope, Tensor, batched, between, ceil_div, cfg, item, replace, tok


def standardise(items: Sequence[torch.Tensor], scope: Scope) -> dict[str, list[torch.Tensor]]:
    """Bring each series to mean 0 and deviation 1, each by itself: units of the sensor do not matter."""
    return {"series": [(x - x.mean(0)) / (x.std(0, correction=0) + 1e-3) for x in items]}


WAVES = ModelSpec(
    "waves",
    Modality(
        "series",
        # what a caller may send: up to max_steps rows of numbers
        item=Tensor(shape=(between(1, cfg.max_steps), cfg.channels)),
        # how items become what the model receives
        process=standardise,
        fields={
            "series": batched(shape=(between(1, cfg.max_steps), cfg.channels), dtype="float32"),
        },
        # what one item becomes in the prompt: a position for every steps_per_token rows, or what is left of them
        placeholder="<patch>",
        tokens=ceil_div(item.length, cfg.steps_per_token),
        # how it gets there: the caller writes one <series> per item
        update=replace(tok["<series>"]),
    ),
)
