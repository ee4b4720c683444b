"""The processors for transformers against vLLM's processing path: what both make of drawn requests.

Ids, ranges with their masks, every value of every field, and what a model receives of them are equal, of token ids and
of text; `unexpand` gives the prompt back. What one refuses, the other does, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from examples import series, terra
from examples.series.spec import WAVES
from examples.terra.spec import TERRA
from mmkit import ModelSpec
from mmkit.plan.encoder_rows import rows_field
from mmkit.testing import Request, Subject, of_spec, vllm_model, vllm_path
from mmkit.testing.differences import find_difference
from mmkit.testing.strategies import for_each
from mmkit.training import Processor


def processor_of(subject: Subject) -> Processor:
    """The processor for transformers of a subject, from the same checkpoint and with the same options."""
    from vllm.transformers_utils import processor, processors

    info = subject.processor.info
    inner = None
    named = getattr(processor, "get_processor_cls_name_from_config", lambda folder: None)  # none up to 0.16
    if hasattr(processors, named(str(subject.model_dir)) or ""):
        inner = info.get_hf_processor()  # transformers has none
    return info.spec.hf_processor_class.from_pretrained(
        subject.model_dir,
        trust_remote_code=info.ctx.model_config.trust_remote_code,
        hf_processor=inner,
        dtype=info.ctx.model_config.dtype,
        mm_processor_kwargs=info.merged_kwargs({}),
    )


def compare(processor: Processor, subject: Subject, prompt: Any, request: Request) -> bool:
    """Compare what both make of a prompt; False where both refuse it.

    Raises:
        AssertionError: they differ.
    """
    data = request.data()
    served, refused = _outcome(lambda: vllm_path.run(subject.processor, prompt, data))
    argument = "text" if isinstance(prompt, str) else "input_ids"
    batch, refused_too = _outcome(lambda: processor(**{argument: prompt}, **data))
    told = f"vLLM: {refused or 'taken'}\nprocessor: {refused_too or 'taken'}"
    assert bool(refused) == bool(refused_too), told
    if refused:
        return False
    same(served.ids, batch["input_ids"][0].tolist(), "ids")
    ranges: dict[str, list[Any]] = {}
    (placements,) = batch["placeholders"]
    takes: list[int] = []
    for at in placements:
        mask = tuple(map(bool, at.tokens.mask))
        takes += [at.start + i for i, embeds in enumerate(mask) if embeds]
        ranges.setdefault(at.modality, []).append((at.start, len(mask), mask))
    same(served.ranges, ranges, "ranges")
    same(takes, batch["mm_token_type_ids"][0].nonzero().flatten().tolist(), "mm_token_type_ids")
    for name, own in processor.plan.preview(prompt, data).fields.items():
        sent = [{key: part[key] for key in served.fields[name][0]} for part in own]
        same(served.fields[name], sent, f"fields of {name}")
    for name, items in served.items.items():
        (received,) = vllm_model.batch_items(items)
        received = {key: value for key, value in received.items() if key != rows_field(name)}
        own = {key: batch[key] for key in received}
        same(received, own, f"what the model receives of {name}")
    plan = processor.plan
    written = plan.unexpand(served.ids, data)
    same(served.ids, plan.expand(written, data), "what unexpand makes, expanded")
    if argument == "input_ids" and plan.spec.prompt is None:
        same(prompt, written, "what unexpand makes")
    return True


def same(served: Any, processed: Any, where: str) -> None:
    """Refuse what differs, vLLM's first."""
    assert not (difference := find_difference(served, processed, where)), difference


def _outcome(run: Callable[[], Any]) -> tuple[Any, str]:
    """What comes of a request, or the sentence with which it is refused."""
    try:
        return run(), ""
    except ValueError as error:
        return None, str(error)


def check(subject: Subject, examples: int) -> tuple[int, int]:
    """Compare drawn requests. Returns how many both take, and how many both refuse."""
    processor, tokenizer = processor_of(subject), subject.processor.info.ctx.tokenizer
    counts = [0, 0]

    def drawn(request: Request) -> None:
        counts[not compare(processor, subject, request.prompt, request)] += 1
        if tokenizer is not None:
            compare(processor, subject, tokenizer.decode(request.prompt), request)

    for_each(subject.requests(), drawn, max_examples=examples, database=None)
    return counts[0], counts[1]


def _example(package: ModuleType, spec: ModelSpec) -> Subject:
    """Of the package's committed checkpoint."""
    package.register()
    return of_spec(spec, package.CHECKPOINT)


EXAMPLES: Mapping[str, Callable[[], Subject]] = {
    "terra": partial(_example, terra, TERRA),
    "series": partial(_example, series, WAVES),
}
"""Subjects of models that vLLM's authors did not write."""
