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

from ..vllm_api import checkpoint_processors as processors  # noqa: F401
from .checks import Report as Report
from .checks import Result as Result
from .checks import check as check
from .checks import check_law as check_law
from .checks import parametrize as parametrize
from .law import Case as Case
from .law import KitError as KitError
from .law import Law as Law
from .law import NotApplicable as NotApplicable
from .law import NotDrawn as NotDrawn
from .law import Violation as Violation
from .laws import LAWS as LAWS
from .strategies import AbsentSample as AbsentSample
from .strategies import AudioSample as AudioSample
from .strategies import ImageSample as ImageSample
from .strategies import ListSample as ListSample
from .strategies import RecordSample as RecordSample
from .strategies import Request as Request
from .strategies import Sample as Sample
from .strategies import TensorSample as TensorSample
from .strategies import TextSample as TextSample
from .strategies import VideoSample as VideoSample
from .strategies import items as items
from .subject import Subject as Subject
from .subject import of_registered as of_registered
from .subject import of_spec as of_spec
