"""A spec compared with the processor classes that it replaces.

Both process the same requests, drawn from the spec's item types and given ones, as token ids and as
text. The comparison covers ids, ranges, masks, and the fields with their kinds, dtypes and every
value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import SpecError
from ..model_spec import ModelSpec
from . import processors, vllm_path
from .differences import differences
from .law import Violation
from .strategies import Request, for_each
from .subject import of_spec as subject_of


@dataclass
class Comparison:
    """The result of a comparison; true if nothing differs.

    Attributes:
        requests: number of compared requests; ids and text count separately.
        refused: number of requests that both refuse.
        taken: sentences of the requests that the spec accepts and the class refuses. This is no
            difference: hand-written classes fail on many well-formed requests.
        known: number of requests with a difference that was known.
        difference: the first other difference, as a sentence; empty for none.
    """

    requests: int = 0
    refused: int = 0
    known: int = 0
    difference: str = ""
    taken: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.difference


@dataclass(frozen=True)
class Given:
    """A request of your own, compared before the drawn ones.

    Attributes:
        prompt: a text, or token ids.
        data: as a caller writes it into ``multi_modal_data``.
        kwargs: `mm_processor_kwargs`.
        items: a short form of the data for messages; None for the data itself.
        source: where the request was read, for messages: ``requests.jsonl:3``.
    """

    prompt: str | list[int]
    data: Mapping[str, Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    items: Any = None
    source: str = ""

    def __repr__(self) -> str:
        source = f"{self.source}: " if self.source else ""
        kwargs = f", mm_processor_kwargs {dict(self.kwargs)!r}" if self.kwargs else ""
        return f"{source}prompt {self.prompt!r}, items {self.items or self.data!r}{kwargs}"


def compare(
    spec: ModelSpec,
    model_dir: Any,
    model_class: type,
    *,
    examples: int = 100,
    given_requests: Iterable[Given] = (),
    known: Sequence[str] = (),
    **options: Any,
) -> Comparison:
    """Compare the generated processor with that of a model class that vLLM, or a plugin, has.

    Args:
        spec: the declaration.
        model_dir: a folder with config, tokenizer and processor files; no weights are needed.
        model_class: a class for which processor classes are registered with vLLM. vLLM reads its
            own attributes of the model class, for example whether it takes raw input, from this
            class.
        examples: number of drawn requests.
        given_requests: requests to compare first.
        known: regular expressions; a difference in whose sentence one of them is found is counted,
            and passed over. The sentence has the request, too.
        options: for `mmkit.testing.of_spec`: `kwargs` and `samples` to draw from, options of vLLM's
            ModelConfig.

    Raises:
        SpecError: the spec does not fit the checkpoint.
    """
    processors.load_general_plugins()
    processors.register_stand_in(processors.read_architectures(model_dir), model_class)
    subject = subject_of(spec, model_dir, **options)
    plan: Any = subject.plan
    context = subject.processor.info.ctx
    reference = processors.make_processor(
        processors.find_factories(model_class), context.model_config
    )
    comparison = Comparison()

    def check(request: Given) -> None:
        of_class, of_spec = _outcome(reference, request), _outcome(subject.processor, request)
        comparison.requests += 1
        if isinstance(of_class, str):
            comparison.refused += isinstance(of_spec, str)
            comparison.taken += [] if isinstance(of_spec, str) else [f"{of_class}\n    {request!r}"]
        elif difference := _difference(of_class, of_spec):
            sentence = f"{difference}\n    {request!r}"
            if not any(re.search(pattern, sentence) for pattern in known):
                raise Violation(sentence)
            comparison.known += 1

    def drawn(request: Request) -> None:
        # in canonical form: hand-written classes interpret other forms differently
        data = {name: [*own.values] for name, own in plan.take(request.data()).items()}
        texts = [] if context.tokenizer is None else [context.tokenizer.decode(request.prompt)]
        for prompt in (request.prompt, *texts):
            check(Given(prompt, data, request.kwargs, dict(request.items)))

    try:
        for request in given_requests:
            check(request)
        if examples:
            for_each(subject.requests(), drawn, max_examples=examples, database=None)
    except Violation as error:
        comparison.difference = str(error)
    except SpecError as error:  # with an item or an option that was drawn
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in the proc")]
        comparison.difference = "\n    ".join([f"The spec is at fault: {error}", *notes])
    return comparison


def _outcome(processor: Any, request: Given) -> vllm_path.Outcome | str:
    try:
        return vllm_path.run(processor, request.prompt, request.data, request.kwargs)
    except Exception as error:  # hand-written classes refuse with any exception
        return f"{type(error).__name__}: {error}"


def _difference(reference: vllm_path.Outcome, port: vllm_path.Outcome | str) -> str | None:
    """The first difference of two outcomes, the class's first."""
    if isinstance(port, str):
        return f"The class takes what the spec refuses: {port}"
    kinds = vllm_path.read_field_kinds(reference), vllm_path.read_field_kinds(port)
    found = differences(replace(reference, hashes={}), replace(port, hashes={}))
    found = found or differences(*kinds, "field kinds")
    return found and f"The class and the spec: {found}"
