"""What runs in the tree of one release: laws on vLLM's own processors, for some of `bugs.BUGS`.

    python -m tools.recall.replay 8 9

prints one line of JSON per bug, `RESULT {...}`. It does not know which release it runs on, nor
what is expected there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import Phase, settings

from tools.matrix.checks import PREFIX, SETTINGS

from .bugs import BUGS, Replay


def main(numbers: list[int]) -> None:
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    settings.register_profile(
        "recall",
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],  # the first request is enough, the smallest takes longer
    )
    settings.load_profile("recall")
    _as_transformers_5()
    for number in numbers:
        result = {"bug": number, **_result(BUGS[number].replay)}
        print(PREFIX + json.dumps(result), flush=True)


def _result(replayed: Replay | None) -> dict[str, Any]:
    """What the law of a replay says here: `holds`, `violated`, `not applicable` or `error`."""
    from mmkit.testing import NotApplicable, Violation, check_law
    from mmkit.testing.laws import outcomes
    from tools.survey.laws import EVERY

    assert replayed is not None
    try:
        subject = _subject(replayed)
    except Exception as error:
        traceback.print_exc()
        return {"status": "error", "message": f"{type(error).__name__}: {error}"[:400]}
    start, status, message = time.perf_counter(), "holds", ""
    try:
        with mock.patch.object(outcomes, "STEPS", replayed.steps or outcomes.STEPS):
            check_law(EVERY[replayed.law], subject, examples=replayed.examples, database=False)
    except NotApplicable as reason:
        status, message = "not applicable", str(reason)
    except Violation as violation:
        status, message = "violated", str(violation)
    except Exception as error:
        traceback.print_exc()
        status, message = "error", f"{type(error).__name__}: {error}"
    seconds = round(time.perf_counter() - start, 1)
    return {"status": status, "message": message[:2000], "seconds": seconds}


def _subject(replayed: Replay) -> Any:
    """The processor that this release has for the tiny checkpoint of a replay."""
    from tools.survey import zoo

    entry = replace(zoo.ZOO[replayed.checkpoint], **replayed.drawn)
    folder = Path(tempfile.mkdtemp(prefix="recall-"))
    shutil.copytree(zoo.checkpoint(replayed.checkpoint), folder, dirs_exist_ok=True)
    for path in folder.glob("*.json"):
        path.write_text(json.dumps(_set(json.loads(path.read_text()), replayed.files)))
    for name, text in replayed.texts.items():
        (folder / name).write_text(text)
    name = f"{replayed.checkpoint}, {replayed.law}, {folder.name}"
    zoo.ZOO[name] = replace(entry, make=folder)
    subject = zoo.subject(name)
    subject.samples = {modality: subject.samples[modality] for modality in entry.modalities}
    if replayed.container:
        subject.samples["image"] = subject.samples["image"].map(
            lambda image: replace(image, container=replayed.container)
        )
    if replayed.most:
        limits = dict.fromkeys(subject.samples, replayed.most)
        subject.processor.info.get_supported_mm_limits = lambda: limits
    return subject


def _set(value: Any, changes: Mapping[str, Any]) -> Any:
    """JSON with other values wherever a key has one."""
    if not isinstance(value, dict):
        return value
    return {key: changes.get(key, _set(inner, changes)) for key, inner in value.items()}


def _as_transformers_5() -> None:
    """Let the makers of checkpoints run on transformers 4: a class has two names since 5, and 4
    looks whether the tokenizer of a processor is of the class that it names."""
    import transformers
    from transformers.configuration_utils import PretrainedConfig
    from transformers.processing_utils import ProcessorMixin

    if not hasattr(transformers, "PreTrainedConfig"):
        sys.modules["transformers"].PreTrainedConfig = PretrainedConfig  # type: ignore[attr-defined]
        ProcessorMixin.check_argument_for_proper_class = lambda self, name, given: type(given)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
    sys.stdout.flush()
    os._exit(0)
