"""Laws about what surrounds a processor: caches, other processes, the model."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from hypothesis import Phase, assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ...errors import InputError
from ...model.sound import largest_magnitude
from ...vllm_api import harness
from ...vllm_api.rendered import UnsaidError, compared
from ..drawing import for_each
from ..strategies import Request
from ..subject import Subject
from ..verdicts import is_of_kit
from .items import embeddings
from .law import Case, KitError, NotApplicable, differences, law

_TRIES = 4
"""Of a request whose items the engine's half of a cache lacks."""


class CacheMachine(RuleBasedStateMachine):
    """L3: requests of a few items, so that some of a request are cached, and at other positions.
    Each is sent without a cache, with vLLM's cache in one process, and with its pair of sender and
    receiver.

    Shrinks towards few requests, a large cache, and no refused request.
    """

    case: Case

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Request] = []
        self.subject = self.case.subject

    @initialize(data=st.data(), capacity=st.sampled_from([1.0, harness.LEAST_CACHE_GIB]))
    def start(self, data: Any, capacity: float) -> None:
        """Some items, and caches of a capacity (in GiB) of all of them or hardly any."""
        subject = self.subject
        few = {}
        for name, limit in subject.limits.items():
            if limit != 0:
                three = data.draw(st.lists(subject.samples[name], min_size=3, max_size=3))
                few[name] = st.sampled_from(three)
        self.requests, self.capacity = subject.requests(of=few), capacity
        self.drifts = False
        self.caches = {
            "in one process": harness.Caches(subject.processor, capacity, pair=False),
            "in two processes": harness.Caches(subject.processor, capacity, pair=True),
        }

    @rule(data=st.data())
    def send(self, data: Any) -> None:
        """A request."""
        self._compare(data.draw(self.requests))

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def send_again(self, data: Any) -> None:
        """A request that was sent before."""
        self._compare(data.draw(st.sampled_from(self.seen)))

    @rule(data=st.data())
    def send_after_a_refusal(self, data: Any) -> None:
        """A request whose prompt lacks the placeholders, then the right one."""
        request = data.draw(self.requests)
        if request.order:
            for cache in self.caches.values():
                with suppress(Exception):
                    self.subject.run(replace(request, prompt=[]), cache)
        self._compare(request, ", refused without a prompt before" * bool(request.order))

    def _compare(self, request: Request, when: str = "") -> None:
        before = f" after {self.seen!r}" if self.seen else ""
        case = replace(self.case, request=request, before=before)
        expected = self.subject.run(request)
        for name, cache in self.caches.items():
            try:
                outcome = self._run(request, cache, expected)
            except Exception as error:
                case.fail(f"with a cache {name}: {type(error).__name__}: {error}{when}")
            if difference := differences(expected, outcome):
                case.fail(f"without a cache and with one {name}: {difference}{when}")
        self.seen.append(request)

    def _run(self, request: Request, cache: harness.Caches, expected: harness.Outcome) -> Any:
        # where one request fills them, the two halves evict in different orders, and vLLM asks for
        # the items again that the engine then lacks
        self.drifts = self.drifts or harness.size_gib(expected) > self.capacity
        for _ in range(_TRIES if self.drifts and harness.Miss else 0):
            try:
                return self.subject.run(request, cache)
            except harness.Miss as error:
                cache.forget(error.mm_hashes)
        return self.subject.run(request, cache)


@law(
    "L3 cache",
    "any sequence of requests gives the same outputs with and without vLLM's processor caches, "
    "however small",
    kind="machine",
    cost=2,
)
def caches(case: Case) -> type[RuleBasedStateMachine]:
    return type("CacheMachine", (CacheMachine,), {"case": case})


@law(
    "L12 processes",
    "the classes survive pickling, and a spawned process gives the same result",
    kind="once",
)
def processes(case: Case) -> None:
    subject = case.subject
    processor = subject.processor
    classes = (type(processor.info), type(processor.dummy_inputs), type(processor))
    pickled = _pickled(classes)
    if isinstance(pickled, str):
        case.fail(f"the classes cannot be pickled: {pickled}")
    if pickle.loads(pickled) != classes:
        case.fail("pickled classes come back as others")
    if _is_unguarded_script():
        raise NotApplicable(
            "a spawned process would run this script again: put what it does below "
            'if __name__ == "__main__":'
        )
    requests = _some(subject)
    config = processor.info.ctx.model_config
    task = (pickled, str(config.model), config.architectures, subject.options, requests)
    outcomes: Any = "it died"
    # unlike a Pool, an executor tells that its process has died
    executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with suppress(BrokenProcessPool), executor as pool:
        outcomes = pickle.loads(pool.submit(_elsewhere, *task).result())
    if isinstance(outcomes, KitError):
        raise outcomes
    if isinstance(outcomes, str):
        case.fail(f"in a spawned process: {outcomes}")
    for request, there in zip(requests, outcomes, strict=True):
        case.request = request
        case.same(subject.run(request), there, "in this process and in a spawned one")


def _pickled(classes: Any) -> bytes | str:
    """Classes as bytes, or why they cannot be."""
    try:
        return pickle.dumps(classes)
    except (pickle.PicklingError, AttributeError) as error:
        return str(error)


def _is_unguarded_script() -> bool:
    """Whether the running program is a script that looks at no `__name__`."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if main.__spec__ is not None or file is None or not file.endswith(".py"):
        return False
    return "__name__" not in Path(file).read_text(encoding="utf-8", errors="replace")


def _some(subject: Subject) -> list[Request]:
    """A few requests, the same ones each time."""
    requests: list[Request] = []

    same = {"phases": [Phase.generate], "derandomize": True, "database": None}
    for_each(subject.requests(), requests.append, max_examples=8, **same)
    return requests


def _elsewhere(
    pickled: bytes,
    model_dir: str,
    architectures: list[str],
    options: dict[str, Any],
    requests: list[Request],
) -> bytes:
    """Outcomes, pickled, or the text of an error: not every error can be pickled."""
    made: Subject | None = None
    try:
        harness.load_plugins()
        harness.stand_in(*architectures)
        config = harness.model_config(model_dir, **options)
        info, dummy_inputs, processor_class = pickle.loads(pickled)
        processor = harness.generated(info, dummy_inputs, processor_class, config)
        made = Subject(processor, {}, model_dir=model_dir)
        outcomes = [harness.run(processor, r.prompt, r.data(), r.kwargs) for r in requests]
    except Exception as error:
        sentence = f"{type(error).__name__}: {error}"
        if made is not None and is_of_kit(error, made):
            return pickle.dumps(KitError(f"in a spawned process: {traceback.format_exc()}"))
        return pickle.dumps(sentence)
    # plain bytes: no shared memory
    return pickle.dumps([replace(outcome, items={}) for outcome in outcomes])


@law(
    "L13 safety",
    "a placeholder without data, or an id outside the vocabulary, cannot crash the model, and it "
    "never samples a placeholder id",
    kind="once",
    needs_model=True,
)
def safety(case: Case) -> None:
    subject, model = case.subject, case.model
    placeholders = sorted(subject.plan.embed_ids) if subject.plan else []
    wrong = [*placeholders, -1, subject.vocabulary_size, 2**31 - 1]
    with torch.inference_mode():
        try:
            embedded = model.embed_input_ids(torch.tensor(wrong))
        except Exception as error:
            case.fail(f"ids {wrong} in a prompt: {type(error).__name__}: {error}")
        if not torch.isfinite(embedded).all():
            case.fail(f"ids {wrong} are embedded as NaN or infinities")
        logits = model.compute_logits(torch.zeros(1, embedded.shape[-1], dtype=embedded.dtype))
    if logits is None:
        return
    sampled = [token for token in placeholders if logits[0, token] != float("-inf")]
    if sampled:
        case.fail(f"placeholder ids {sampled} can be sampled")


@law(
    "L14 containment",
    "whatever an item holds and its encoder makes of it, what the language model gets is finite "
    "and not too large for its dtype, and the other items of a batch have the rows that they "
    "have alone",
    cost=3,
    needs_model=True,
    dtypes=("float32", "bfloat16", "float16"),
)
def containment(case: Case) -> None:
    subject, model = case.subject, case.model
    request = case.draw_request(most=2)
    dtype = subject.processor.info.ctx.model_config.dtype
    bound, limits = largest_magnitude(dtype), torch.finfo(dtype)
    extremes = [torch.nan, torch.inf, -torch.inf, limits.max, -limits.max, 65504.0]
    value = case.draw(st.sampled_from(extremes))
    outcome = subject.run(request)
    beside = f"in {dtype}, beside an item of {value:g}"
    for name, items in outcome.items.items():
        alone = harness.rows(model, {name: items})[name]
        together = harness.rows(model, {name: [*items, harness.filled(items[0], value)]})[name]
        for i, (one, other) in enumerate(zip(alone, together, strict=False)):
            if not _near(one, other):
                case.fail(f"{beside}, {name}[{i}] has other rows than alone")
        modality = subject.plan.modalities[name] if subject.plan else None
        if modality is not None and modality.intake.takes_embeds:
            rows = torch.full_like(alone[0], value)
            together += harness.embedded(model, modality, items[0], rows)
        entering = harness.merged(model, together)
        if not torch.isfinite(entering).all():
            case.fail(f"{beside}, the language model gets NaN or infinities")
        largest = float(entering.abs().amax()) if entering.numel() else 0.0
        if largest > bound:
            case.fail(f"{beside}, the language model gets {largest:g} and can take {bound:g}")


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether encoder rows are equal but for the order in which a batch is summed."""
    if one.shape != other.shape:
        return False
    near = 64 * torch.finfo(one.dtype).eps * float(one.abs().amax()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=near)


@law(
    "L16 strangers",
    "items of different requests in one encoder batch have the rows that each has alone, raw items "
    "and embeddings",
    cost=2,
    needs_model=True,
)
def strangers(case: Case) -> None:
    subject, model = case.subject, case.model
    request = case.draw_request(least=1, most=2)
    other = case.draw(subject.requests(least=1, most=2))
    case.before = f" beside {other!r}"
    here, there = subject.run(request), subject.run(other)
    for name in here.items.keys() & there.items.keys():
        alone = [
            [harness.rows(model, {name: [item]})[name][0] for item in outcome.items[name]]
            for outcome in (here, there)
        ]
        ours, theirs = [here.items[name]], [there.items[name]]
        modality = subject.plan.modalities[name] if subject.plan else None
        if modality is not None and modality.intake.takes_embeds:
            ours.append(_embedded(subject, request, modality, alone[0], here))
            theirs.append(_embedded(subject, other, modality, alone[1], there))
        for one, another in product(ours, theirs):
            _check_together(case, name, [*one, *another], [*alone[0], *alone[1]])


def _embedded(
    subject: Subject, request: Request, modality: Any, rows: list[torch.Tensor], outcome: Any
) -> list[Any]:
    """The items of a modality as they are if their rows are sent in their place."""
    data = {**request.data(), modality.name: embeddings(modality, rows, outcome)}
    sent = harness.run(subject.processor, request.prompt, data, request.kwargs)
    return sent.items[modality.name]


def _check_together(case: Case, name: str, items: list[Any], alone: list[torch.Tensor]) -> None:
    what = f"{len(items)} items of {name} of two requests in one batch"
    try:
        together = harness.rows(case.model, {name: items})[name]
    except Exception as error:
        case.fail(f"{what}: {type(error).__name__}: {error}")
    if len(together) != len(items):
        case.fail(f"{what}: {len(together)} encoder outputs")
    for i, (one, beside) in enumerate(zip(alone, together, strict=True)):
        if not _near(one, beside):
            case.fail(f"{what}: number {i} has other rows than alone")


@law(
    "L15 wire",
    "a request that is rendered, written as vLLM sends it to another host and read there passes "
    "the guard with the same ids, ranges and fields, under hashes of its content",
    cost=2,
)
def wire(case: Case) -> None:
    subject = case.subject
    if subject.plan is None:
        raise NotApplicable("only processors of mmkit have a guard behind them")
    if not harness.takes_rendered(subject.plan):
        raise NotApplicable("fields from elsewhere are refused: their items are wanted")
    request = case.draw_request()
    read = set().union(*(compared(m.spec) for m in subject.plan.modalities.values()))
    # the options of a request are not sent
    assume(not request.kwargs or all(leaf.root != "kwargs" for leaf in read))
    here = subject.run(request)
    try:
        body = harness.sent(subject.processor, request.prompt, request.data(), request.kwargs)
        received = harness.received(body)
    except Exception as error:
        case.fail(f"its fields cannot be sent: {type(error).__name__}: {error}")
    named = {name: ["a name"] * len(hashes) for name, hashes in here.hashes.items()}
    try:
        there = harness.admitted(subject.processor, received)
        renamed = harness.admitted(subject.processor, {**received, "mm_hashes": named})
    except UnsaidError as reason:
        raise NotApplicable(f"the spec says too little of its fields: {reason}") from reason
    except InputError as error:
        case.fail(f"refused: {error}")
    for part in ("ids", "ranges", "fields"):
        case.same(getattr(here, part), getattr(there, part), "here and there", part)
    case.same(harness.kinds(here), harness.kinds(there), "here and there", "field configs")
    case.same(there.hashes, renamed.hashes, "sent under other names", "hashes")
    for name, hashes in there.hashes.items():
        items = zip(hashes, there.fields[name], strict=True)
        for (one, fields), (other, others) in combinations(items, 2):
            if (one == other) != (differences(fields, others) is None):
                case.fail(f"items of {name} that differ have one hash, or equal ones have two")
