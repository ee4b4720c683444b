"""The processors for transformers against vLLM's processing path: what both make of drawn requests.

Ids, ranges with their masks, every value of every field, and what a model receives of them are equal, of token ids and
of text; `unexpand` gives the prompt back. What one refuses, the other does, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from examples import series, terra
from examples.series.spec import WAVES
from examples.terra.spec import TERRA
from mmkit.plan.encoder_rows import row_count_field
from mmkit.testing import Request, Subject, of_spec, vllm_model, vllm_path
from mmkit.testing.differences import find_difference
from mmkit.testing.strategies import for_each
from mmkit.training import Processor


class Counts(NamedTuple):
    """The numbers of drawn requests that both processors take, and that both refuse."""

    accepted: int
    refused: int


def check(subject: Subject, examples: int) -> Counts:
    """Compare both processors of a subject on drawn requests.

    Raises:
        AssertionError: they differ.
    """
    processor = make_processor(subject)
    tokenizer = subject.processor.info.ctx.tokenizer
    accepted = 0
    refused = 0

    def compare_drawn(request: Request) -> None:
        nonlocal accepted, refused
        if compare(processor, subject.processor, request.prompt, request.data()):
            accepted += 1
        else:
            refused += 1
        if tokenizer is not None:
            compare(processor, subject.processor, tokenizer.decode(request.prompt), request.data())

    for_each(subject.requests(), compare_drawn, max_examples=examples, database=None)
    return Counts(accepted, refused)


def make_processor(subject: Subject) -> Processor:
    """Make the processor for transformers of a subject, from the same checkpoint and with the same options."""
    info = subject.processor.info
    hf_processor = None
    if _only_vllm_has_processor(subject):
        hf_processor = info.get_hf_processor()
    return info.spec.hf_processor_class.from_pretrained(
        subject.model_dir,
        trust_remote_code=info.ctx.model_config.trust_remote_code,
        hf_processor=hf_processor,
        dtype=info.ctx.model_config.dtype,
        mm_processor_kwargs=info.merge_kwargs({}),
    )


def _only_vllm_has_processor(subject: Subject) -> bool:
    """Return whether the Hugging Face processor of a checkpoint is in vLLM, and not in transformers."""
    from vllm.transformers_utils import processor, processors

    find_name = getattr(processor, "get_processor_cls_name_from_config", None)
    if find_name is None:  # up to 0.16
        return False
    name = find_name(str(subject.model_dir))
    return bool(name) and hasattr(processors, name)


# -- the comparison of one request -------------------------------------------------------------------------------------


def compare(processor: Processor, processor_of_vllm: Any, prompt: Any, data: Mapping[str, Any]) -> bool:
    """Compare what both processors make of a prompt with items.

    Args:
        processor: that for transformers.
        processor_of_vllm: vLLM's.
        prompt: a text, or token ids.
        data: the items, as a caller writes them into `multi_modal_data`.

    Returns:
        False where both refuse it.

    Raises:
        AssertionError: they differ.
    """
    argument = "text" if isinstance(prompt, str) else "input_ids"

    def serve() -> Any:
        return vllm_path.run(processor_of_vllm, prompt, data)

    def process() -> Any:
        return processor(**{argument: prompt}, **data)

    served = _run_or_refuse(serve)
    batch = _run_or_refuse(process)
    verdicts = f"vLLM: {_describe(served)}\nprocessor: {_describe(batch)}"
    assert isinstance(served, str) == isinstance(batch, str), verdicts
    if isinstance(served, str):
        return False
    _compare_placements(processor, served, batch)
    _compare_fields(processor, served, prompt, data)
    for name, items in served.items.items():
        _compare_model_inputs(name, items, batch)
    _compare_unexpanded(processor, served, prompt, data)
    return True


def _run_or_refuse(run: Callable[[], Any]) -> Any:
    """Return what comes of a request, or the sentence with which it is refused."""
    try:
        return run()
    except ValueError as error:
        return str(error)


def _describe(result: Any) -> str:
    return result if isinstance(result, str) else "accepted"


def assert_equal(served: Any, processed: Any, where: str) -> None:
    """Fail if two values differ; vLLM's is the first."""
    difference = find_difference(served, processed, where)
    assert not difference, difference


def _compare_placements(processor: Processor, served: vllm_path.Outcome, batch: Any) -> None:
    """Compare the ids, the ranges of the items, and the positions that receive rows.

    For items that become ids only, vLLM gets no ranges.
    """
    assert_equal(served.ids, batch["input_ids"][0].tolist(), "ids")
    ranges: dict[str, list[Any]] = {}
    embed_positions: list[int] = []
    (placements,) = batch["placeholders"]
    for placement in placements:
        if processor.plan.modalities[placement.modality].is_ids_only:
            continue
        mask = tuple(bool(flag) for flag in placement.tokens.mask)
        ranges.setdefault(placement.modality, []).append((placement.start, len(mask), mask))
        for index, embeds in enumerate(mask):
            if embeds:
                embed_positions.append(placement.start + index)
    assert_equal(served.ranges, ranges, "ranges")
    in_types = batch["mm_token_type_ids"][0].nonzero().flatten().tolist()
    assert_equal(embed_positions, in_types, "mm_token_type_ids")


def _compare_fields(processor: Processor, served: vllm_path.Outcome, prompt: Any, data: Any) -> None:
    """Compare the fields of each item; the preview of a plan also has those that do not reach the model."""
    for name, previewed in processor.plan.preview(prompt, data).fields.items():
        if processor.plan.modalities[name].is_ids_only:
            assert name not in served.fields
            continue
        names = list(served.fields[name][0])
        fields = []
        for of_item in previewed:
            fields.append({key: of_item[key] for key in names})
        assert_equal(served.fields[name], fields, f"fields of {name}")


def _compare_model_inputs(name: str, items: list[Any], batch: Any) -> None:
    """Compare the arguments with which a model is called for the items of a modality."""
    (arguments,) = vllm_model.batch_items(items)
    received = dict(arguments)
    received.pop(row_count_field(name), None)
    in_batch = {key: batch[key] for key in received}
    assert_equal(received, in_batch, f"what the model receives of {name}")


def _compare_unexpanded(processor: Processor, served: vllm_path.Outcome, prompt: Any, data: Any) -> None:
    """Compare the prompt that `unexpand` makes of the expanded one with the caller's.

    The ids of an item that became ids only may stand elsewhere in the prompt, too, and are taken for the item there.
    """
    plan = processor.plan
    unexpanded = plan.unexpand(served.ids, data)
    assert_equal(served.ids, plan.expand(unexpanded, data), "what unexpand makes, expanded")
    has_ids_only = any(plan.modalities[name].is_ids_only for name in data)
    if not isinstance(prompt, str) and plan.spec.prompt is None and not has_ids_only:
        assert_equal(prompt, unexpanded, "what unexpand makes")


# -- subjects of models that vLLM's authors did not write --------------------------------------------------------------


def open_terra() -> Subject:
    terra.register()
    return of_spec(TERRA, terra.CHECKPOINT)


def open_series() -> Subject:
    series.register()
    return of_spec(WAVES, series.CHECKPOINT)


EXAMPLES: Mapping[str, Callable[[], Subject]] = {"terra": open_terra, "series": open_series}
