"""What ``pytest --mmkit MODULE:SPEC --mmkit-model DIR`` collects: one test per law."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..errors import MmkitError
from ..importing import import_named
from ..model_spec import ModelSpec
from .checks import check_in_test, find_law, list_marks
from .law import Law
from .laws import LAWS
from .subject import Subject, of_registered, of_spec
from .vllm_engine import has_both

REGISTERED = "registered"
"""In place of a spec: the processor that vLLM, or a plugin, has for the checkpoint."""

_HOW_TO_PASS_SAMPLES = (
    "mmkit draws images, videos and audio by itself; for other items, pass --samples "
    "MODULE:FUNCTION (to pytest, --mmkit-samples)."
)


class Laws(pytest.File):
    """The config of a checkpoint, as what the laws are checked on."""

    subject: Subject

    def collect(self) -> Iterator[Any]:
        get_option = self.config.getoption
        try:
            self.subject = self._open_subject()
            expected = load_expected(get_option("--mmkit-expected"))
            self._require_drawn_items()
        except MmkitError as error:
            raise self.CollectError(str(error)) from error
        for modality in self.subject.undrawn:
            yield UndrawnItems.from_parent(self, name=f"items of {modality}")
        for law in LAWS.values():
            test = LawTest.from_parent(self, name=law.name)
            if not self._is_wanted(law):
                reason = f"{law.name}: it loads the model, which --mmkit-load asks for"
                test.add_marker(pytest.mark.skip(reason))
            for mark in list_marks(law, expected):
                test.add_marker(mark)
            yield test

    def _is_wanted(self, law: Law) -> bool:
        """Return whether a law is checked here: one about the model is only if it is asked for.

        The law about the log probabilities of a class that vLLM runs as it is always is.
        """
        if law.needs_engine and has_both(self.subject):
            return True
        return not law.needs_model or bool(self.config.getoption("--mmkit-load"))

    def _require_drawn_items(self) -> None:
        """Raise a `MmkitError` if no modality has items to draw: then no law could be checked."""
        subject = self.subject
        if not subject.limits:
            expected = f"a strategy for items of {subject.describe_undrawn()}"
            raise MmkitError(str(subject.model_dir), expected, "none", _HOW_TO_PASS_SAMPLES)

    def _open_subject(self) -> Subject:
        get_option = self.config.getoption
        folder = self.path.parent
        options = {"trust_remote_code": get_option("--mmkit-trust-remote-code")}
        if get_option("--mmkit-samples"):
            make_samples = import_named(get_option("--mmkit-samples"))
            options["samples"] = make_samples()
        if get_option("--mmkit") != REGISTERED:
            spec = import_named(get_option("--mmkit"), ModelSpec)
            return of_spec(spec, folder, **options)
        try:
            return of_registered(folder, **options)
        except Exception as error:
            expected = "a checkpoint for which vLLM, or a plugin, has a multimodal processor"
            raise MmkitError(str(folder), expected, f"{type(error).__name__}: {error}") from error


class LawTest(pytest.Item):
    """The test of a law; its parent is a `Laws`."""

    def runtest(self) -> None:
        laws: Any = self.parent
        check_in_test(LAWS[self.name], laws.subject, self.config.getoption("--mmkit-examples"))

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name  # pytest wants a line of tests that a mark skips


class UndrawnItems(pytest.Item):
    """Shows, as a skipped test, that the laws were checked without the items of a modality."""

    def runtest(self) -> None:
        pytest.skip(f"{self.name}: no strategy for them. {_HOW_TO_PASS_SAMPLES}")


def load_expected(file: Path | None) -> dict[str, str]:
    """Read the known violations from a TOML file, with a reason or a link for each.

    A line is, for example, ``independence = "pads to the batch"``.

    Raises:
        MmkitError: the file cannot be read, or has other contents.
    """
    if file is None:
        return {}
    expected = 'TOML lines as independence = "a reason or a link"'
    try:
        violations = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MmkitError(str(file), expected, f"{type(error).__name__}: {error}") from error
    for name, reason in violations.items():
        find_law(name)
        if not isinstance(reason, str) or not reason.strip():
            raise MmkitError(str(file), expected, f"{name} = {reason!r}")
    return violations
