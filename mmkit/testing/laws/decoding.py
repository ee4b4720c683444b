"""The law about what comes out of a model."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from ...bound.output import BoundOutput
from ...errors import InputError
from ..differences import brief
from ..law import Case, NotApplicable, law


@law(
    "whatever ids an output allows are an array of one shape, and the same one after encode and "
    "decode; other ids are refused",
)
def outputs(case: Case) -> None:
    plan = case.subject.plan
    if plan is None:
        raise NotApplicable("a processor written by hand declares no outputs")
    if not plan.outputs:
        raise NotApplicable("the spec declares no outputs")
    output = plan.outputs[case.draw(st.sampled_from(sorted(plan.outputs)))]
    ids, other = _drawn(case, output), _drawn(case, output)
    said = f"{output.name} of the ids {brief(ids)}"
    decoded = output.decode(ids)
    array = decoded.copy()
    form, smallest = f"{array.dtype} {array.shape}", f"{output.dtype} {output.shape}"
    if form != smallest:
        case.fail(f"{said}: {form}, and of the smallest ids {smallest}")
    output.decode(other)
    case.same(array, decoded, f"{said}, before and after other ids are decoded", "array")
    if output.spec.encode is not None:
        again = output.decode(output.encode(array))
        if not output.spec.lossy:
            case.same(array, again, f"{said}, before and after encode and decode", "array")
    _refuses(case, output, ids)


def _drawn(case: Case, output: BoundOutput) -> list[int]:
    """Ids that may stand there: the smallest or the largest ones, or any."""
    start, stop = np.array([(ids.start, ids.stop) for ids in output.allowed]).T
    drawn = case.draw(st.sampled_from(["smallest", "largest"]) | st.integers(0, 2**32 - 1))
    if drawn == "smallest":
        ids = start
    elif drawn == "largest":
        ids = stop - 1
    else:
        ids = np.random.default_rng(drawn).integers(start, stop)
    values: list[int] = ids.tolist()
    return values


def _refuses(case: Case, output: BoundOutput, ids: list[int]) -> None:
    at = case.draw(st.integers(0, len(ids) - 1))
    allowed = output.allowed[at]
    other = case.draw(st.sampled_from([allowed.start - 1, allowed.stop]))
    damaged = {
        "one id less": ids[:at] + ids[at + 1 :],
        "one id more": ids[: at + 1] + ids[at:],
        f"the id {other} at position {at}": [*ids[:at], other, *ids[at + 1 :]],
    }
    for what, wrong in damaged.items():
        try:
            output.decode(wrong)
        except InputError:
            continue
        case.fail(f"{output.name} with {what} is decoded: {brief(wrong)}")
