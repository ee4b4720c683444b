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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Return a public name.

    The laws import Hypothesis and vLLM's loaders of models, which takes seconds: whoever needs a
    module of this package alone, such as `mmkit show`, does not wait for them.
    """
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__all__":
        return _list_public_names()
    public = import_module(".public", __name__)
    if name in globals():  # a module of this package, which is imported now
        return globals()[name]
    if name not in _list_public_names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(public, name)
    globals()[name] = value  # so that Python finds it without this function from now on
    return value


def __dir__() -> list[str]:
    """List the names of this module and the public ones."""
    return sorted({*globals(), *_list_public_names()})


def _list_public_names() -> list[str]:
    public = import_module(".public", __name__)
    return [name for name in vars(public) if not name.startswith("_")]
