"""A conformance kit for multimodal processors on vLLM: the laws, and one line to check them.

>>> import mmkit.testing
>>> print(mmkit.testing.check(SPEC, "path/of/checkpoint"))  # every law that needs no model
>>> print(mmkit.testing.check(SPEC, "path/of/checkpoint", model=True))  # and those that do
>>> print(mmkit.testing.check(mmkit.testing.of_registered("path/of/checkpoint")))  # vLLM's own

In a test file, with one test per law and law names as ids (``pytest -k ranges``)::

    @mmkit.testing.parametrize(SPEC, "path/of/checkpoint", expected={"independence": "pads"})
    def test_laws(check):
        check()

Or without any file: ``pytest --mmkit package.module:SPEC --mmkit-model path/of/checkpoint``.
"""

from __future__ import annotations

from .checks import Report, Result, check, check_law, parametrize
from .law import Case, KitError, Law, NotApplicable, NotDrawn, Status, Violation
from .laws import LAWS
from .strategies import (
    AudioSample,
    ImageSample,
    RecordSample,
    Request,
    Sample,
    TensorSample,
    TextSample,
    VideoSample,
    items,
    prompts,
)
from .subject import Subject, of_registered, of_spec

__all__ = [
    "LAWS",
    "AudioSample",
    "Case",
    "ImageSample",
    "KitError",
    "Law",
    "NotApplicable",
    "NotDrawn",
    "RecordSample",
    "Report",
    "Request",
    "Result",
    "Sample",
    "Status",
    "Subject",
    "TensorSample",
    "TextSample",
    "VideoSample",
    "Violation",
    "check",
    "check_law",
    "items",
    "of_registered",
    "of_spec",
    "parametrize",
    "prompts",
]
