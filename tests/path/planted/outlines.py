"""Bugs that the law of mmkit/testing/laws/outlines.py catches: facts that tell something else than the items."""

from __future__ import annotations

from mmkit import ModelSpec, Tensor, between, embed, item, tok
from mmkit.testing import Subject

from .base import frames
from .bug import planted, with_parser, with_step

BY_LENGTH = ModelSpec(
    "by_length",
    frames(item=Tensor((between(1, 4), 3)), layout=embed(tok["<pad>"]) * item.length, embeds=False),
)


@planted("outline", r"vLLM's path and the outline by facts: ids: \d+ and \d+ long")
def items_cut_short() -> Subject:
    def parse_modality(correct, modality, data):
        return correct(modality, [value[:2] for value in data])

    return with_parser(parse_modality, BY_LENGTH)


@planted("outline", r"vLLM's path and the outline by items: hashes\['frames'\]\[\d\]: ")
def hashes_of_one_process() -> Subject:
    def hash_items(correct, plan, hasher, request):
        correct(plan, hasher, request)
        for of_request in request.items:
            of_request.hash = f"{of_request.hash}-of-this-process"

    return with_step("hash_items", hash_items)
