"""A spec compared with the processor classes that it replaces.

Both process the same requests, drawn from the spec's item types and given ones, as token ids and as
text. The comparison covers ids, ranges, masks, and the fields with their kinds, dtypes and every
value.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import SpecError
from ..model_spec import ModelSpec
from ..vllm_api import checkpoint_processors
from . import vllm_path
from .differences import find_difference
from .law import Violation
from .strategies import Request, for_each
from .subject import Subject
from .subject import of_spec as subject_of


@dataclass
class Comparison:
    """The result of a comparison; true if nothing differs, and each modality was compared.

    Attributes:
        requests: number of requests; ids and text count separately.
        refused: number of requests that both refuse.
        refused_by_class: sentences of the requests that only the class refuses. This is no
            difference: hand-written classes fail on many well-formed requests.
        requests_by_modality: number of requests that have items of a modality.
        taken_by_modality: number of those that the class takes.
        known_differences: number of requests with a difference that was known.
        difference: the first other difference, as a sentence; empty for none.
    """

    requests: int = 0
    refused: int = 0
    known_differences: int = 0
    difference: str = ""
    refused_by_class: list[str] = field(default_factory=list)
    requests_by_modality: Counter[str] = field(default_factory=Counter)
    taken_by_modality: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return not self.difference and not self.not_compared

    @property
    def not_compared(self) -> list[str]:
        """Modalities of requests that were never compared: the class refuses each with them."""
        return [name for name in self.requests_by_modality if not self.taken_by_modality[name]]


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
    """Compare the generated processor with the processor of a model class of vLLM or of a plugin.

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
    checkpoint_processors.load_general_plugins()
    checkpoint_processors.register_stand_in(
        checkpoint_processors.read_architectures(model_dir), model_class
    )
    subject = subject_of(spec, model_dir, **options)
    factories = checkpoint_processors.find_factories(model_class)
    model_config = subject.processor.info.ctx.model_config
    reference = checkpoint_processors.make_processor(factories, model_config)
    comparison = Comparison()

    def compare_drawn(request: Request) -> None:
        for variant in _list_variants(subject, request):
            _compare_request(comparison, reference, subject.processor, variant, known)

    try:
        for request in given_requests:
            _compare_request(comparison, reference, subject.processor, request, known)
        if examples:
            for_each(subject.requests(), compare_drawn, max_examples=examples, database=None)
    except Violation as error:
        comparison.difference = str(error)
    except SpecError as error:  # with an item or an option that was drawn
        lines = [f"The spec is at fault: {error}"]
        for note in getattr(error, "__notes__", ()):
            if note.startswith("in the proc"):
                lines.append(note)
        comparison.difference = "\n    ".join(lines)
    return comparison


def _list_variants(subject: Subject, request: Request) -> list[Given]:
    """Return a drawn request with its prompt as ids and, where there is a tokenizer, as a text.

    Items are in canonical form: hand-written classes interpret other forms differently.
    """
    plan: Any = subject.plan
    data: dict[str, list[Any]] = {}
    for item in plan.parse_items(request.data()):
        data.setdefault(item.modality, []).append(item.value)
    prompts: list[Any] = [request.prompt]
    tokenizer = subject.processor.info.ctx.tokenizer
    if tokenizer is not None:
        prompts.append(tokenizer.decode(request.prompt))
    items = dict(request.items)
    return [Given(prompt, data, request.kwargs, items) for prompt in prompts]


def _compare_request(
    comparison: Comparison,
    reference: Any,
    processor: Any,
    request: Given,
    known_patterns: Sequence[str],
) -> None:
    """Process a request by both processors, and count the result in a comparison.

    Raises:
        Violation: the results differ, and the difference is not known.
    """
    of_class = _run_or_refuse(reference, request)
    of_spec = _run_or_refuse(processor, request)
    modalities = _list_modalities(request)
    comparison.requests += 1
    comparison.requests_by_modality.update(modalities)
    if isinstance(of_class, str):
        if isinstance(of_spec, str):
            comparison.refused += 1
        else:
            comparison.refused_by_class.append(f"{of_class}\n    {request!r}")
        return
    comparison.taken_by_modality.update(modalities)
    difference = _find_difference(of_class, of_spec)
    if difference is None:
        return
    sentence = f"{difference}\n    {request!r}"
    if not any(re.search(pattern, sentence) for pattern in known_patterns):
        raise Violation(sentence)
    comparison.known_differences += 1


def _list_modalities(request: Given) -> list[str]:
    """Return the modalities of which a request has items."""
    modalities = []
    for modality, items in request.data.items():
        if not isinstance(items, list) or items:
            modalities.append(modality)
    return modalities


def _run_or_refuse(processor: Any, request: Given) -> vllm_path.Outcome | str:
    """Return the outcome of a request, or the exception with which it is refused, as a text."""
    try:
        return vllm_path.run(processor, request.prompt, request.data, request.kwargs)
    except Exception as error:  # hand-written classes refuse with any exception
        return f"{type(error).__name__}: {error}"


def _find_difference(of_class: vllm_path.Outcome, of_spec: vllm_path.Outcome | str) -> str | None:
    """Return the first difference of two outcomes as a sentence; hashes are not compared."""
    if isinstance(of_spec, str):
        return f"The class takes what the spec refuses: {of_spec}"
    difference = find_difference(replace(of_class, hashes={}), replace(of_spec, hashes={}))
    if difference is None:
        kinds_of_class = vllm_path.list_field_kinds(of_class)
        kinds_of_spec = vllm_path.list_field_kinds(of_spec)
        difference = find_difference(kinds_of_class, kinds_of_spec, "field kinds")
    if difference is None:
        return None
    return f"The class and the spec: {difference}"
