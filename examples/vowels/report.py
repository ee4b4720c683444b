"""What is written of a run: the line, the table and the picture of the documentation."""

from collections.abc import Sequence
from typing import NamedTuple

from .picture import Panel
from .recordings import QUESTION, Recording

SPEAKERS_SHOWN = (1, 7)
"""The picture shows the first recording of each, and the first that the baseline and that the model have wrong."""


class Counts(NamedTuple):
    """How many recordings of the test have the right answer.

    Attributes:
        recordings: all of them.
        http: of the model, through the server.
        transformers: of the model, in transformers.
        swapped: of the model, through the server, where each request has the recording of another one.
        before_swap: of the same answers, compared with the recordings before they were swapped.
        neighbour: of the nearest neighbour by dynamic time warping.
        regression: of logistic regression on summaries.
    """

    recordings: int
    http: int
    transformers: int
    swapped: int
    before_swap: int
    neighbour: int
    regression: int


def write_line(counts: Counts) -> str:
    """Return the result in one sentence."""
    return (
        f"Of {counts.recordings} real recordings that it was not trained on, the model names the speaker of "
        f"{counts.http}, asked over HTTP. 1-NN with dynamic time warping has {counts.neighbour} right, logistic "
        f"regression on summary statistics {counts.regression}."
    )


def write_table(counts: Counts) -> str:
    """Return the result as a table of the documentation."""
    rows = {
        "the model, through the server": counts.http,
        "the model, in transformers": counts.transformers,
        "the model, through the server, recordings swapped, against the recording that was sent": counts.swapped,
        "the same answers against the recording before the swap": counts.before_swap,
        "nearest neighbour, dynamic time warping": counts.neighbour,
        "logistic regression on mean, deviation and mean absolute difference": counts.regression,
    }
    lines = [f"| answers | right of {counts.recordings} |", "| --- | --- |"]
    for name, right in rows.items():
        lines.append(f"| {name} | {right} ({right / counts.recordings:.1%}) |")
    return "\n".join(lines) + "\n"


def choose_panels(recordings: Sequence[Recording], answers: Sequence[str], neighbours: Sequence[str]) -> list[Panel]:
    """Return the recordings of the picture.

    Args:
        recordings: those of the test.
        answers: of the model.
        neighbours: the answers of the baseline.
    """
    chosen = []
    for speaker in SPEAKERS_SHOWN:
        for index, recording in enumerate(recordings):
            if recording.speaker == speaker:
                chosen.append(index)
                break
    for wrong in (neighbours, answers):
        for index, recording in enumerate(recordings):
            if wrong[index] != recording.answer:
                chosen.append(index)
                break
    panels = []
    for index in sorted(chosen):
        recording = recordings[index]
        panels.append(Panel(recording.frames, QUESTION, recording.answer, answers[index], neighbours[index]))
    return panels
