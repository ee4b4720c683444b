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
from .checks import check_in_test, law_of, marks_of
from .laws import LAWS
from .subject import Subject, of_registered, of_spec

REGISTERED = "registered"
"""In place of a spec: the processor that vLLM, or a plugin, has for the checkpoint."""


class Laws(pytest.File):
    """The config of a checkpoint, as what the laws are checked on."""

    subject: Subject

    def collect(self) -> Iterator[Any]:
        option = self.config.getoption
        try:
            self.subject, known = self._subject(), expectations(option("--mmkit-expected"))
        except MmkitError as error:
            raise self.CollectError(str(error)) from error
        for law in LAWS.values():
            if option("--mmkit-load") or not law.needs_model:
                test = LawTest.from_parent(self, name=law.name)
                for mark in marks_of(law, known):
                    test.add_marker(mark)
                yield test

    def _subject(self) -> Subject:
        option, folder = self.config.getoption, self.path.parent
        options = {"trust_remote_code": option("--mmkit-trust-remote-code")}
        if option("--mmkit-samples"):
            options["samples"] = import_named(option("--mmkit-samples"))()
        if option("--mmkit") != REGISTERED:
            return of_spec(import_named(option("--mmkit"), ModelSpec), folder, **options)
        try:
            return of_registered(folder, **options)
        except Exception as error:
            expected = "a checkpoint for which vLLM, or a plugin, has a multimodal processor"
            raise MmkitError(str(folder), expected, f"{type(error).__name__}: {error}") from error


class LawTest(pytest.Item):
    """A law."""

    def runtest(self) -> None:
        subject, examples = vars(self.parent)["subject"], self.config.getoption("--mmkit-examples")
        check_in_test(LAWS[self.name], lambda: subject, examples)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


def expectations(file: Path | None) -> dict[str, str]:
    """The known violations of a TOML file, with a reason or a link for each: lines such as
    ``independence = "pads to the batch"``.

    Raises:
        MmkitError: the file cannot be read, or has other contents.
    """
    if file is None:
        return {}
    expected = 'TOML lines as independence = "a reason or a link"'
    try:
        known = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MmkitError(str(file), expected, f"{type(error).__name__}: {error}") from error
    for name, why in known.items():
        law_of(name)
        if not isinstance(why, str) or not why.strip():
            raise MmkitError(str(file), expected, f"{name} = {why!r}")
    return known
