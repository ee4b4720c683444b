"""The laws: what must hold of any processor on vLLM, each a named check on a `Subject`.

A law draws what it needs (a request, several, a change to one) through Hypothesis, and raises
`Violation` in one sentence where it does not hold. docs/laws.md tells what each law says and what
it does not test.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ..errors import InputError
from ..model.sound import largest_magnitude
from ..vllm_api import harness
from .strategies import Request
from .subject import Subject

__all__ = ["LAWS", "Law", "NotApplicable", "Violation"]


class Violation(AssertionError):
    """A law does not hold; the message names the law and what was seen."""


class NotApplicable(Exception):
    """A law has nothing to say about this subject; the message tells why."""


@dataclass(frozen=True)
class Law:
    """One law.

    Attributes:
        name: ``L5 independence``.
        statement: what it says, in one sentence.
        check: raises `Violation`; gets a subject, and Hypothesis' `data` where it draws anything.
        kind: ``drawn`` for checks of drawn requests, ``once`` for a single check, ``machine`` for
            one that returns a state machine of Hypothesis.
        cost: requests per example; of a law with several, as many fewer examples are drawn.
        needs_model: the check wants the model, loaded without an engine.
        dtypes: in which the model is loaded, one after the other.
    """

    name: str
    statement: str
    check: Callable[..., Any]
    kind: str = "drawn"
    cost: int = 1
    needs_model: bool = False
    dtypes: tuple[str, ...] = ("float32",)

    @property
    def number(self) -> str:
        return self.name.split()[0]


LAWS: dict[str, Law] = {}


def _law(
    name: str, statement: str, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(check: Callable[..., Any]) -> Callable[..., Any]:
        made = Law(name, statement, check, **options)
        LAWS[made.number] = made
        return check

    return register


@contextmanager
def _of(
    law: str, request: Request | None = None, before: str = ""
) -> Iterator[Callable[[bool, str], None]]:
    """A function that raises a violation of that law where its first argument does not hold."""

    def hold(condition: bool, otherwise: str) -> None:
        if not condition:
            raise Violation(
                f"{LAWS[law].name}: {otherwise}"
                + (f"\n    in {request!r}{before}" if request else "")
            )

    yield hold


def differences(one: Any, other: Any, where: str = "") -> str | None:
    """The first difference of two outcomes, or of parts of them; None if they are equal."""
    if isinstance(one, harness.Outcome):
        for part in ("ids", "ranges", "hashes", "fields"):
            if found := differences(getattr(one, part), getattr(other, part), part):
                return found
        return None
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"{where}: {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
        return None if torch.equal(one, other) else f"{where}: values differ"
    if isinstance(one, dict) and isinstance(other, dict):
        if set(one) != set(other):
            return f"{where}: {sorted(one)} and {sorted(other)}"
        return next(
            (d for key in one if (d := differences(one[key], other[key], f"{where}[{key!r}]"))),
            None,
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)} long"
        if all(isinstance(value, int) for value in (*one, *other)):
            return (
                None if list(one) == list(other) else f"{where}: {_brief(one)} and {_brief(other)}"
            )
        pairs = enumerate(zip(one, other, strict=True))
        return next((d for i, (a, b) in pairs if (d := differences(a, b, f"{where}[{i}]"))), None)
    same = type(one) is type(other) and bool(one == other)
    return None if same else f"{where}: {_brief(one)} and {_brief(other)}"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


# -- what one request becomes ----------------------------------------------------------------------


@_law(
    "L1 counts",
    "an item has as many encoder rows as its layout has embed positions, of the width that the "
    "language model takes",
    needs_model=True,
)
def _counts(subject: Subject, data: Any, model: Any) -> None:
    request = data.draw(subject.requests())
    outcome = subject.run(request)
    with _of("L1", request) as hold:
        made = harness.rows(model, outcome.items)
        width = harness.hidden_size(subject.processor)
        for name, ranges in outcome.ranges.items():
            hold(
                len(made[name]) == len(ranges),
                f"{len(made[name])} encoder outputs for {len(ranges)} items of {name}",
            )
            for i, ((_, _, mask), rows) in enumerate(zip(ranges, made[name], strict=True)):
                hold(
                    len(rows) == sum(mask),
                    f"{name}[{i}] has {len(rows)} encoder rows and {sum(mask)} embed positions",
                )
                wide = rows.shape[1:] == (width,)
                hold(
                    wide,
                    f"{name}[{i}] has rows of shape {tuple(rows.shape[1:])}, and the model takes "
                    f"({width},)",
                )


@_law(
    "L2 ranges",
    "placeholder ranges are in bounds, disjoint and in the order of their items; the ids at a "
    "range are the layout of its item; everything outside is the caller's prompt; numbered "
    "placeholders in another order are refused, or get the items of their numbers",
)
def _ranges(subject: Subject, data: Any) -> None:
    request = data.draw(subject.requests())
    outcome = subject.run(request)
    _check_ranges("L2", subject, request, outcome)
    for permuted in _permuted(subject, request, data):
        try:
            ranges = subject.run(permuted).ranges
        except Exception:  # refused, as it may be
            continue
        placed = sorted(permuted.order, key=lambda at: ranges[at[0]][at[1]][0])
        with _of("L2", permuted) as hold:
            hold(
                placed == [*permuted.order],
                f"placeholders of {[*permuted.order]} get the items {placed}",
            )


def _permuted(subject: Subject, request: Request, data: Any) -> Iterator[Request]:
    """The same items, with the numbered placeholders of a modality (``<|image_1|>``) in another
    order."""
    for name, samples in request.items.items():
        pieces = subject.pieces(name, samples, request.kwargs) if len(samples) > 1 else []
        targets = {tuple(piece.written) for piece in pieces if piece.written != piece.ids}
        if not pieces or len(targets) < len(pieces):
            continue
        numbers = list(range(len(pieces)))
        order = data.draw(st.permutations(numbers).filter(partial(operator.ne, numbers)))
        prompt = list(pieces[0].prefix)
        for number in order:
            prompt += [*pieces[number].written, subject.ordinary[0]]
        yield Request(
            prompt, {name: samples}, request.kwargs, tuple((name, number) for number in order)
        )


def _check_ranges(law: str, subject: Subject, request: Request, outcome: harness.Outcome) -> None:
    with _of(law, request) as hold:
        placed = []
        for name, samples in request.items.items():
            ranges = outcome.ranges.get(name, [])
            hold(
                len(ranges) == len(samples),
                f"{len(ranges)} ranges for {len(samples)} items of {name}",
            )
            hold(
                [r[0] for r in ranges] == sorted(r[0] for r in ranges),
                f"the ranges of {name} are not in order",
            )
            pieces = subject.pieces(name, samples, request.kwargs)
            placed += [
                (*r, piece, f"{name}[{i}]")
                for i, (r, piece) in enumerate(zip(ranges, pieces, strict=True))
            ]
        position, rebuilt = 0, []
        for offset, length, mask, piece, item in sorted(placed, key=lambda p: (p[0], p[1])):
            hold(
                offset >= position,
                f"{item} at {offset} begins inside the range before it, which ends at {position}",
            )
            hold(
                offset + length <= len(outcome.ids),
                f"{item} ends at {offset + length}, past {len(outcome.ids)} ids",
            )
            found = outcome.ids[offset : offset + length]
            hold(
                found == piece.ids,
                f"the ids at {item} are {_brief(found)}, its layout is {_brief(piece.ids)}",
            )
            hold(mask == piece.mask, f"the mask of {item} is not that of its layout")
            rebuilt += outcome.ids[position:offset] + ([] if piece.inserted else piece.written)
            position = offset + length
        rebuilt += outcome.ids[position:]
        wanted = subject.postprocessed(request)
        hold(
            rebuilt == wanted,
            f"outside the ranges the prompt is {_brief(rebuilt)}, the caller's {_brief(wanted)}",
        )


@_law("L4 text = tokens", "a text prompt and its token ids give the same result")
def _text(subject: Subject, data: Any) -> None:
    info = subject.processor.info
    if info.ctx.tokenizer is None:
        raise NotApplicable("the model has no tokenizer")
    request = data.draw(subject.requests())
    text = info.ctx.tokenizer.decode(request.prompt)
    ids = harness.encoded(subject.processor, text)
    wanted = _outcome(subject, ids, request)
    with _of("L4", request) as hold:
        for way in ("renderer", "processor"):
            found = differences(wanted, _outcome(subject, text, request, way))
            hold(not found, f"the ids of a text and, by the {way}, the text {text!r}: {found}")


def _outcome(subject: Subject, prompt: Any, request: Request, way: str = "renderer") -> Any:
    """The outcome, or that there is none: decoding may change what the ids mean."""
    try:
        return harness.run(
            subject.processor, prompt, request.data(), request.kwargs, direct=way == "processor"
        )
    except Exception:
        return "refused"


@_law(
    "L5 independence",
    "the fields and the layout of an item do not depend on the other items of the request",
)
def _independence(subject: Subject, data: Any) -> None:
    request = data.draw(subject.requests(least=2))
    assume(subject.may_cache(request))
    together = subject.run(request)
    with _of("L5", request) as hold:
        for name, samples in request.items.items():
            for i, sample in enumerate(samples):
                alone = subject.run(subject.minimal(name, sample, request.kwargs))
                found = differences(alone.fields[name][0], together.fields[name][i])
                hold(not found, f"{name}[{i}] alone and in this request: {found}")
                rows = [
                    sum(outcome.ranges[name][j][2]) for outcome, j in ((alone, 0), (together, i))
                ]
                hold(
                    rows[0] == rows[1],
                    f"{name}[{i}] has {rows[0]} embed positions alone and {rows[1]} in this "
                    "request",
                )


@_law(
    "L8 round trip",
    "splitting the processed fields into items and batching these again changes nothing",
)
def _round_trip(subject: Subject, data: Any) -> None:
    request = data.draw(subject.requests())
    with _of("L8", request) as hold:
        outcome = subject.run(request)
        for name, samples in request.items.items():
            for i, fields in enumerate(outcome.fields.get(name, [])):
                hold(bool(fields), f"{name}[{i}] has no fields")
            hold(
                len(outcome.fields.get(name, [])) == len(samples),
                f"{name} has items without fields",
            )
        for field, (raw, joined) in harness.round_trip(
            subject.processor, request.data(), request.kwargs
        ).items():
            hold(joined is not None, f"the field {field!r} was processed and reaches no item")
            found = differences(_as_list(raw), _as_list(joined))
            hold(not found, f"the field {field!r} before and after: {found}")
        if subject.plan is not None:
            for name, found_items in outcome.fields.items():
                declared = subject.plan.modalities[name].fields
                for i, fields in enumerate(found_items):
                    hold(
                        set(fields) == set(declared),
                        f"{name}[{i}] has {sorted(fields)}, declared are {sorted(declared)}",
                    )
            split = harness.parts(subject.processor, request.data(), request.kwargs)
            for name, wanted in split.items():
                found = differences(wanted, outcome.fields.get(name), name)
                hold(not found, f"split by the spec and by vLLM: {found}")


def _as_list(value: Any) -> Any:
    """A stacked tensor and the list of its parts are the same field."""
    return list(value) if isinstance(value, torch.Tensor) and value.ndim else value


@_law("L10 idempotence", "a prompt that is expanded already is not expanded again")
def _idempotence(subject: Subject, data: Any) -> None:
    request = data.draw(subject.requests())
    outcome = subject.run(request)
    again = replace(request, prompt=outcome.ids)
    with _of("L10", again) as hold:
        try:
            second = subject.run(again)
        except Exception as error:
            raise Violation(
                f"{LAWS['L10'].name}: refused with {type(error).__name__}: {error}\n    in "
                f"{again!r}"
            ) from error
        wanted = [outcome.ids]
        if subject.plan is None:  # vLLM's own classes may put something around every prompt
            wanted.append(subject.postprocessed(again))
        hold(second.ids in wanted, f"{len(outcome.ids)} ids became {len(second.ids)}")
        for name, ranges in outcome.ranges.items():
            lengths, masks = [r[1] for r in ranges], [r[2] for r in ranges]
            hold(
                lengths == [r[1] for r in second.ranges[name]],
                f"the ranges of {name} have other lengths",
            )
            hold(masks == [r[2] for r in second.ranges[name]], f"the masks of {name} are others")


# -- items, hashes, limits -------------------------------------------------------------------------


@_law(
    "L6 worst case",
    "no item has more encoder rows than stated, and the dummy item has as many as stated",
)
def _worst_case(subject: Subject, data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(subject.samples)))
    assume(subject.limits.get(name, 0) != 0)
    key = f"_most_{name}"
    if key not in vars(subject):
        setattr(subject, key, harness.most_rows(subject.processor, name))
    stated, reached = getattr(subject, key)
    sample = data.draw(subject.samples[name])
    request = subject.minimal(name, sample)
    with _of("L6", request) as hold:
        hold(
            stated == reached,
            f"{stated} rows are stated for {name}, and the dummy item has {reached}",
        )
        ((_, _, mask),) = subject.run(request).ranges[name]
        hold(
            sum(mask) <= stated,
            f"{name} has an item of {sum(mask)} rows, and at most {stated} are stated",
        )


@_law(
    "L7 identity",
    "items of equal content have equal hashes whatever their container; other content or kwargs "
    "have another hash",
)
def _identity(subject: Subject, data: Any) -> None:
    request = data.draw(subject.requests(most=1))
    name = next(iter(request.items))
    (sample,) = request.items[name]
    with _of("L7", request) as hold:

        def hash_of(value: Any, kwargs: Any) -> str:
            made = harness.run(
                subject.processor, request.prompt, {**request.data(), name: [value]}, kwargs
            )
            return made.hashes[name][0]

        # one hash for two contents makes an answer wrong, two for one content only cost a miss: the
        # former first
        first = hash_of(sample.value(), request.kwargs)
        other = sample.other()
        if differences(_content(sample), _content(other)):
            hold(hash_of(other.value(), request.kwargs) != first, f"{other!r} has the same hash")
        kwargs = data.draw(subject.kwargs)
        if kwargs != request.kwargs:
            try:
                got = hash_of(sample.value(), kwargs)
            except Exception:  # the prompt may not fit under other kwargs
                got = ""
            hold(got != first, f"kwargs {kwargs!r} have the same hash")
        for value in sample.same():
            try:
                got = hash_of(value, request.kwargs)
            except Exception as error:
                if subject.plan is None:  # a container that is refused has no hash
                    continue
                hold(False, f"the same content as {type(value).__name__} is refused: {error}")
            hold(got == first, f"the same content as {type(value).__name__} has another hash")


def _content(sample: Any) -> Any:
    value = sample.same()[0]
    value = value[0] if isinstance(value, tuple) else value
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.array(value))


@_law(
    "L9 refusal",
    "missing, surplus or malformed items, and placeholder counts that do not match, are refused "
    "in a message that names the modality",
    cost=4,
)
def _refusal(subject: Subject, data: Any) -> None:
    request = data.draw(subject.requests())
    with _of("L9", request) as hold:
        for sent, how in _broken(subject, request):
            try:
                harness.run(subject.processor, request.prompt, sent, request.kwargs)
            except Exception as error:
                if subject.plan is not None:
                    hold(
                        isinstance(error, InputError),
                        f"{how}: refused with {type(error).__name__}: {error}",
                    )
                    named = any(
                        name in str(error)
                        for name in (*subject.samples, "prompt", "multi_modal_data")
                    )
                    hold(named, f"{how}: the message names no modality: {error}")
            else:
                hold(False, f"{how}: accepted")


def _broken(subject: Subject, request: Request) -> list[tuple[dict[str, Any], str]]:
    """Data that must be refused with the prompt of a request, and what is wrong with it."""
    sent = request.data()
    found: list[tuple[dict[str, Any], str]] = [
        ({**sent, "no_such_modality": [1]}, "an unknown modality")
    ]
    for name, values in sent.items():

        def add(values: list[Any], how: str, name: str = name) -> None:
            found.append(({**sent, name: values}, how))

        if any(n == name for n, _ in request.order):  # written in the prompt
            add([*values, values[0]], f"one item of {name} too many")
            if len(values) > 1:
                add(values[1:], f"one item of {name} too few")
        # elsewhere vLLM's renderer refuses it, before any processor sees it
        if subject.plan is not None:
            add([*values[:-1], None], f"None as an item of {name}")
        add([*values[:-1], "text"], f"a text as an item of {name}")
        add([*values[:-1], object()], f"an object as an item of {name}")
        if (
            isinstance(values[-1], torch.Tensor)
            and values[-1].numel()
            and values[-1].is_floating_point()
        ):
            if subject.plan is None or getattr(subject.plan.modalities[name].item, "finite", True):
                bad = values[-1].clone()
                bad.view(-1)[0] = float("nan")
                add([*values[:-1], bad], f"NaN in an item of {name}")
            add(
                [*values[:-1], torch.stack([values[-1], values[-1]])[None]],
                f"a wrong shape in {name}",
            )
    return found


@_law(
    "L11 embeds", "precomputed embeddings get the ranges of the item that they were computed from"
)
def _embeds(subject: Subject, data: Any) -> None:
    accepting = [
        name
        for name in subject.samples
        if subject.plan is None or subject.plan.modalities[name].intake.takes_embeds
    ]
    if subject.plan is not None and not accepting:
        raise NotApplicable("no modality takes embeddings")
    hidden = harness.hidden_size(subject.processor)
    request = data.draw(subject.requests())
    name = data.draw(st.sampled_from([n for n in request.items if n in accepting] or accepting))
    assume(name in request.items)
    outcome = subject.run(request)
    rows = [torch.ones(sum(mask), hidden) for _, _, mask in outcome.ranges[name]]
    try:
        if subject.plan is None:
            forms = harness.embeddings(subject.processor, name, rows, outcome.fields[name])
        else:
            forms = [{f"{name}_embeds": rows}]
            harness.parsed(subject.processor, {**request.data(), name: forms[0]})
    except Exception as error:
        if subject.plan is not None:
            raise Violation(
                f"{LAWS['L11'].name}: the spec takes embeddings of {name}, and the parser refuses "
                f"them: {error}"
                f"\n    in {request!r}"
            ) from error
        if len(accepting) > 1:
            return  # another modality may take them
        raise NotApplicable(f"embeddings are refused: {error}") from error
    for form in forms:
        sent = {**request.data(), name: form}
        with _of("L11", request) as hold:
            try:
                made = harness.run(subject.processor, request.prompt, sent, request.kwargs)
            except Exception as error:
                # a refusal that says so is one, whoever gives it; that of a generated class comes
                # from its parser
                named = subject.plan is None and "embedding" in str(error).lower()
                sent_as = f"(sent as a {type(form).__name__})"
                hold(
                    named,
                    f"embeddings of {name} pass the parser, then {type(error).__name__}: {error} "
                    f"{sent_as}",
                )
            else:
                found = differences(outcome.ranges, made.ranges, "ranges")
                hold(not found, f"the raw item and its embeddings: {found}")


# -- caches, processes, the model ------------------------------------------------------------------


class CacheMachine(RuleBasedStateMachine):
    """L3: requests of a few items, so that some of a request are cached, and at other positions.
    Each is sent without a cache, with vLLM's cache in one process, and with its pair of sender and
    receiver.

    Shrinks towards few requests, a large cache, and no refused request.
    """

    subject: Subject

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Request] = []

    @initialize(data=st.data(), capacity=st.sampled_from([1.0, harness.LEAST_CACHE_GIB]))
    def start(self, data: Any, capacity: float) -> None:
        """Some items, and caches of a capacity (in GiB) of all of them or hardly any."""
        subject = self.subject
        names = [name for name, limit in subject.limits.items() if limit != 0]
        few = {
            name: data.draw(st.lists(subject.samples[name], min_size=3, max_size=3))
            for name in names
        }
        self.requests = subject.requests(
            of={name: st.sampled_from(found) for name, found in few.items()}
        )
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
        expected = self.subject.run(request)
        with _of("L3", request, f" after {self.seen!r}" * bool(self.seen)) as hold:
            for name, cache in self.caches.items():
                try:
                    got = self.subject.run(request, cache)
                except Exception as error:
                    hold(False, f"with a cache {name}: {type(error).__name__}: {error}{when}")
                found = differences(expected, got)
                hold(not found, f"without a cache and with one {name}: {found}{when}")
        self.seen.append(request)


@_law(
    "L3 cache",
    "any sequence of requests gives the same outputs with and without vLLM's processor caches, "
    "however small",
    kind="machine",
    cost=2,
)
def _caches(subject: Subject) -> type[RuleBasedStateMachine]:
    return type("CacheMachine", (CacheMachine,), {"subject": subject})


@_law(
    "L12 processes",
    "the classes survive pickling, and a spawned process gives the same result",
    kind="once",
)
def _processes(subject: Subject) -> None:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    made = subject.processor
    classes = (type(made.info), type(made.dummy_inputs), type(made))
    with _of("L12") as hold:
        try:
            pickled = pickle.dumps(classes)
        except (pickle.PicklingError, AttributeError) as error:
            hold(False, f"the classes cannot be pickled: {error}")
        hold(pickle.loads(pickled) == classes, "pickled classes come back as others")
        requests = _some(subject)
        config = made.info.ctx.model_config
        sent = (pickled, str(config.model), config.architectures, subject.options, requests)
        try:  # unlike a Pool, an executor tells that its process has died
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                got = pickle.loads(pool.submit(_elsewhere, *sent).result())
        except BrokenProcessPool as error:
            hold(False, f"a spawned process died: {error}")
        hold(not isinstance(got, str), f"in a spawned process: {got}")
    for request, there in zip(requests, got, strict=True):
        found = differences(subject.run(request), there)
        with _of("L12", request) as hold:
            hold(not found, f"in this process and in a spawned one: {found}")


def _some(subject: Subject) -> list[Request]:
    """A few requests, the same ones each time."""
    found: list[Request] = []

    @settings(
        max_examples=8,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    @given(request=subject.requests())
    def collect(request: Request) -> None:
        found.append(request)

    collect()
    return found


def _elsewhere(
    pickled: bytes,
    model_dir: str,
    architectures: list[str],
    options: dict[str, Any],
    requests: list[Request],
) -> bytes:
    """Outcomes, pickled, or the text of an error: not every error can be pickled."""
    try:
        harness.load_plugins()
        harness.stand_in(*architectures)
        info, dummy_inputs, processor = pickle.loads(pickled)
        made = harness.generated(
            info, dummy_inputs, processor, harness.model_config(model_dir, **options)
        )
        outcomes = [
            harness.run(made, request.prompt, request.data(), request.kwargs)
            for request in requests
        ]
    except Exception as error:
        return pickle.dumps(f"{type(error).__name__}: {error}")
    # plain bytes: no shared memory
    return pickle.dumps([replace(outcome, items={}) for outcome in outcomes])


@_law(
    "L13 safety",
    "a placeholder without data, or an id outside the vocabulary, cannot crash the model, and it "
    "never samples a placeholder id",
    kind="once",
    needs_model=True,
)
def _safety(subject: Subject, model: Any) -> None:
    size = subject.vocabulary_size
    placeholders = sorted(subject.plan.embed_ids) if subject.plan else []
    bad = torch.tensor([*placeholders, -1, size, 2**31 - 1])
    with _of("L13") as hold, torch.inference_mode():
        try:
            made = model.embed_input_ids(bad)
        except Exception as error:
            hold(False, f"ids {bad.tolist()} in a prompt: {type(error).__name__}: {error}")
        hold(
            bool(torch.isfinite(made).all()),
            f"ids {bad.tolist()} are embedded as NaN or infinities",
        )
        logits = model.compute_logits(torch.zeros(1, made.shape[-1], dtype=made.dtype))
        sampled = [
            token
            for token in placeholders
            if logits is not None and logits[0, token] != float("-inf")
        ]
        hold(not sampled, f"placeholder ids {sampled} can be sampled")


@_law(
    "L14 containment",
    "whatever an item holds and its encoder makes of it, what the language model gets is finite "
    "and not too large for its dtype, and the other items of a batch have the rows that they "
    "have alone",
    cost=3,
    needs_model=True,
    dtypes=("float32", "bfloat16", "float16"),
)
def _containment(subject: Subject, data: Any, model: Any) -> None:
    request = data.draw(subject.requests(most=2))
    dtype = subject.processor.info.ctx.model_config.dtype
    bound = largest_magnitude(dtype)
    extremes = [
        torch.nan,
        torch.inf,
        -torch.inf,
        torch.finfo(dtype).max,
        -torch.finfo(dtype).max,
        65504.0,
    ]
    value = data.draw(st.sampled_from(extremes))
    outcome = subject.run(request)
    beside = f"in {dtype}, beside an item of {value:g}"
    with _of("L14", request) as hold:
        for name, items in outcome.items.items():
            alone = harness.rows(model, {name: items})[name]
            together = harness.rows(model, {name: [*items, harness.filled(items[0], value)]})[name]
            for i, (one, other) in enumerate(zip(alone, together, strict=False)):
                near = 64 * torch.finfo(dtype).eps * float(one.abs().amax()) if one.numel() else 0.0
                hold(
                    torch.allclose(one, other, rtol=0, atol=near),
                    f"{beside}, {name}[{i}] has other rows than alone",
                )
            if subject.plan is not None and subject.plan.modalities[name].intake.takes_embeds:
                together += harness.embedded(
                    model, subject.plan.modalities[name], torch.full_like(alone[0], value)
                )
            entering = harness.merged(model, together)
            hold(
                bool(torch.isfinite(entering).all()),
                f"{beside}, the language model gets NaN or infinities",
            )
            largest = float(entering.abs().amax()) if entering.numel() else 0.0
            hold(
                largest <= bound,
                f"{beside}, the language model gets {largest:g} and can take {bound:g}",
            )


for _number in sorted(LAWS, key=lambda number: int(number[1:])):
    LAWS[_number] = LAWS.pop(_number)
