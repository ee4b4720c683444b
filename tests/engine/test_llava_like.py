"""The LLaVA-like model in the real engine: parity with vLLM's own class and with transformers, embeddings, processes,
chat, weights."""

import base64
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from examples.llava_like import ARCHITECTURE, register
from examples.llava_like.cases import Case, draw_picture, make_cases
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.offline import answer, engine
from examples.llava_like.reference import Reference
from examples.llava_like.spec import LLAVA_LIKE
from mmkit import InputError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
COUNT = 60
IMAGE = 3  # the placeholder id of the checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def cases(tokenizer: Any) -> list[Case]:
    return make_cases(tokenizer, COUNT)


@pytest.fixture(scope="module")
def engines() -> Iterator[ExitStack]:
    """Holds engines in this process until the module ends: the first that ends takes down what all of them share."""
    with pytest.MonkeyPatch.context() as env, ExitStack() as stack:
        env.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        env.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        env.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        register()
        yield stack


@pytest.fixture(scope="module")
def llava(checkpoint: Path, engines: ExitStack) -> Any:
    """The engine with the model, for the whole module."""
    return engines.enter_context(engine(checkpoint, seed=0))


@pytest.fixture(scope="module")
def answers(llava: Any, cases: list[Case]) -> list[list[int]]:
    """The model's ids, from cold caches."""
    return answer(llava, [case.request() for case in cases])


def model_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


def text_of(case: Case, tokenizer: Any) -> str:
    return case.prompt if isinstance(case.prompt, str) else tokenizer.decode(case.prompt[1:])


def test_spec_is_short() -> None:
    assert len(Path(sys.modules[LLAVA_LIKE._module].__file__ or "").read_text().splitlines()) <= 30


# -- parity --------------------------------------------------------------------------------------------------------


def test_cases_cover_what_they_should(cases: list[Case]) -> None:
    """No to three images, as text and as ids, with images that come again, of many sizes."""
    kinds = [(len(case.images), isinstance(case.prompt, str)) for case in cases]
    assert {kinds.count((n, text)) >= 5 for n in range(4) for text in (True, False)} == {True}
    sizes = {image.size for case in cases for image in case.images}
    assert len(sizes) >= 8
    assert sum(len(case.images) for case in cases) >= 5 * len(sizes)
    assert any(len(set(map(id, case.images))) < len(case.images) for case in cases)


def test_greedy_ids_are_those_of_vllms_own_class(
    checkpoint: Path, engines: ExitStack, llava: Any, cases: list[Case], answers: list[list[int]]
) -> None:
    own = engines.enter_context(engine(checkpoint, own=True, seed=0))
    assert type(model_of(own)).__module__ == "vllm.model_executor.models.llava"
    assert type(model_of(llava)).__module__ == "examples.llava_like.model"
    assert answer(own, [case.request() for case in cases]) == answers


def test_greedy_ids_are_those_of_transformers(
    reference: Reference, tokenizer: Any, cases: list[Case], answers: list[list[int]]
) -> None:
    assert [reference.answer(text_of(case, tokenizer), case.images) for case in cases] == answers


def test_answers_depend_on_the_images(cases: list[Case], llava: Any, answers: list[list[int]]) -> None:
    """The same prompts with other pictures, and with the same ones in another order."""
    others = [Case(case.prompt, tuple(draw_picture(100 + i) for i, _ in enumerate(case.images))) for case in cases]
    got = answer(llava, [case.request() for case in others])
    changed = [a != b for case, a, b in zip(cases, got, answers, strict=True) if case.images]
    assert all(changed)
    case = next(case for case in cases if len({image.size for image in case.images}) == 3)
    forth, back = answer(llava, [case.request(), case.request(list(reversed(case.images)))])
    assert forth != back


def test_caches_change_nothing(llava: Any, cases: list[Case], answers: list[list[int]]) -> None:
    """One by one, after all of them were answered: prompts come from the prefix cache, images from the processor's."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    cached = 0
    for case, ids in zip(cases, answers, strict=True):
        (result,) = llava.generate([case.request()], sampling, use_tqdm=False)
        assert list(result.outputs[0].token_ids) == ids
        cached += bool(result.num_cached_tokens)
    assert cached >= COUNT // 2
    assert llava.llm_engine.vllm_config.cache_config.enable_prefix_caching


def test_embeddings_stand_for_their_images(
    llava: Any, reference: Reference, cases: list[Case], answers: list[list[int]]
) -> None:
    """Computed by transformers; as one tensor, as a list, and under mmkit's own key. Noise gives other ids."""
    wanted = [ids for case, ids in zip(cases, answers, strict=True) if case.images]
    with_images = [case for case in cases if case.images]
    rows = [reference.embed(case.images) for case in with_images]
    assert {tuple(row.shape) for one in rows for row in one} == {(16, 64)}
    ways = (torch.stack, list, lambda one: {"image_embeds": one})
    for i, way in enumerate(ways):
        sent = [case.request(way(one)) for case, one in zip(with_images, rows, strict=True)]
        assert answer(llava, sent) == wanted, i
    noise = [case.request(torch.randn(len(case.images), 16, 64)) for case in with_images]
    assert not any(a == b for a, b in zip(answer(llava, noise), wanted, strict=True))


def test_full_strategy(tmp_path: Path, engines: ExitStack, tokenizer: Any) -> None:
    """With the class token an image has one row more."""
    folder = make_checkpoint(tmp_path, strategy="full")
    llava, reference = engines.enter_context(engine(folder, seed=0)), Reference(folder)
    cases = make_cases(tokenizer, 12)
    got = answer(llava, [case.request() for case in cases])
    assert [reference.answer(text_of(case, tokenizer), case.images) for case in cases] == got
    case = next(case for case in cases if case.images)
    (row, *_) = rows = reference.embed(case.images)
    assert row.shape == (17, 64)
    assert answer(llava, [case.request(rows)]) == [got[cases.index(case)]]


def test_placeholder_is_never_sampled(llava: Any) -> None:
    """Not even when a caller pushes it as far as vLLM lets them."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=64, ignore_eos=True, seed=0, logit_bias={IMAGE: 100.0})
    (result,) = llava.generate(["USER: hello"], sampling, use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 64
    assert IMAGE not in result.outputs[0].token_ids


# -- malformed requests --------------------------------------------------------------------------------------------

PICTURE = draw_picture(0)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image too many": (
        Case("see <image>", (PICTURE, PICTURE)).request(),
        "llava_like.image: expected 2 placeholder(s) [3] in the prompt for 2 items, got 1, and 1 placeholder id(s) in "
        "all. Write one placeholder per item, and nothing else with its id.",
    ),
    "a placeholder too many": (
        Case([1, IMAGE, 5, IMAGE], (PICTURE,)).request(),
        "llava_like.image: expected 1 placeholder(s) [3] in the prompt for 1 item, got 2, and 2 placeholder id(s) in "
        "all. Write one placeholder per item, and nothing else with its id.",
    ),
    "no image": (
        {"prompt": "see <image>"},
        "llava_like.image: expected one item per placeholder, got 1 placeholder id(s) 3 and no item. "
        'Send multi_modal_data={"image": [...]}, or leave the placeholders out.',
    ),
    "not an image": (
        Case("see <image>", (PICTURE,)).request([b"picture"]),
        "llava_like.image[0]: expected a PIL image or an array, got bytes b'picture'.",
    ),
    "embeddings of too few rows": (
        Case("see <image>", (PICTURE,)).request(torch.zeros(1, 15, 64)),
        "llava_like.image[0]: expected 16 embedding row(s), got 15.",
    ),
    "embeddings of another width": (
        Case("see <image>", (PICTURE,)).request(torch.zeros(1, 16, 32)),
        "llava_like.image[0]: expected a finite floating (rows, 64) tensor, got shape (16, 32).",
    ),
    "embeddings that are not finite": (
        Case("see <image>", (PICTURE,)).request(torch.full((1, 16, 64), torch.nan)),
        "llava_like.image[0]: expected finite values of magnitude <= 65504, got NaN or an infinity.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_requests_are_refused(llava: Any, cases: list[Case], answers: list[list[int]], name: str) -> None:
    """By one sentence, before the engine; the next good request gives the same ids as before."""
    bad, sentence = REFUSED[name]
    with pytest.raises(InputError) as refusal:
        answer(llava, [bad])
    assert str(refusal.value) == sentence
    assert not llava.llm_engine.has_unfinished_requests()
    assert answer(llava, [cases[3].request()]) == [answers[3]]


# -- other processes -----------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """For processes that know the model by its entry point alone."""
    made = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    for variable in ("VLLM_ENABLE_V1_MULTIPROCESSING", "MMKIT_MODULES"):
        made.pop(variable, None)
    return made


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_two_processes_give_the_same_ids(
    checkpoint: Path, cases: list[Case], answers: list[list[int]], tmp_path: Path, split: str
) -> None:
    """By the command line: two processes share each layer, or each has half of the layers."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "examples.llava_like", "--model", str(checkpoint), "--prompts", str(COUNT)]
    command += [f"--{split}-parallel-size", "2", "--no-compare", "--report", str(report)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    embedded = [ids for case, ids in zip(cases, answers, strict=True) if case.images]
    assert json.loads(report.read_text())["ids"] == answers + embedded


QUESTION = "What is this?"


def data_url(picture: Any) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def messages(picture: Any, text: str = QUESTION) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": data_url(picture)}}
    return [{"role": "user", "content": [{"type": "text", "text": text}, image]}]


def test_chat_is_the_prompt_that_the_template_makes(llava: Any, tokenizer: Any) -> None:
    """The placeholder's text comes from the model class; the offline chat route."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    (chat,) = llava.chat(messages(PICTURE), sampling, use_tqdm=False)
    wanted = answer(llava, [Case(f"USER: <image>\n{QUESTION}\nASSISTANT:", (PICTURE,)).request()])
    assert [list(chat.outputs[0].token_ids)] == wanted


# -- weights -------------------------------------------------------------------------------------------------------

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> Weights:
    """With the published names."""
    return load_file(checkpoint / "model.safetensors")


def copied(checkpoint: Path, folder: Path, weights: Weights, **changes: Any) -> Any:
    """The checkpoint with other weights, and vLLM's configuration for it, changed."""
    from vllm.engine.arg_utils import EngineArgs

    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        (folder / name).write_text((checkpoint / name).read_text())
    overrides = {"architectures": [ARCHITECTURE], **changes}
    return EngineArgs(str(folder), dtype="float32", hf_overrides=overrides, enforce_eager=True).create_engine_config()


def load_model(checkpoint: Path, folder: Path, weights: Weights) -> Any:
    """The model, loaded by vLLM from a folder with these weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = copied(checkpoint, folder, weights)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


def new_model(checkpoint: Path, folder: Path, **changes: Any) -> Any:
    """The model before its weights are loaded, each to NaN: afterwards vLLM packs them, and none can be compared."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    config = copied(checkpoint, folder, {}, **changes)
    with set_current_vllm_config(config):
        model = initialize_model(vllm_config=config)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model


def renamed(name: str, *, inside: bool, vision_model: bool) -> str:
    """A published name as transformers has it inside, or with less in it."""
    if not vision_model:
        name = name.replace("vision_tower.vision_model.", "vision_tower.")
    if not inside:
        return name
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return "model." + name.replace("language_model.model.", "language_model.", 1)


@pytest.mark.parametrize("vision_model", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_names_of_all_versions_of_transformers(
    llava: Any, checkpoint: Path, weights: Weights, tmp_path: Path, inside: bool, vision_model: bool
) -> None:
    names = {name: renamed(name, inside=inside, vision_model=vision_model) for name in weights}
    assert (sorted(names.values()) == sorted(weights)) is (not inside and vision_model)
    wanted, got = new_model(checkpoint, tmp_path), new_model(checkpoint, tmp_path)
    wanted.load_weights(weights.items())
    got.load_weights((names[name], weight) for name, weight in weights.items())
    assert all(torch.equal(weight, wanted.get_parameter(name)) for name, weight in got.named_parameters())
    assert not any(weight.isnan().any() for weight in got.parameters())


def test_names_that_transformers_saves(
    checkpoint: Path, reference: Reference, weights: Weights, tmp_path: Path
) -> None:
    """The layouts of the test above are those of the installed version: its files and its modules."""
    reference.model.save_pretrained(tmp_path)
    layouts = [
        {renamed(name, inside=inside, vision_model=vision_model) for name in weights}
        for inside in (True, False)
        for vision_model in (True, False)
    ]
    assert set(load_file(tmp_path / "model.safetensors")) in layouts
    assert set(reference.model.state_dict()) in layouts


UNUSED = ("vision_tower.vision_model.encoder.layers.2.", "vision_tower.vision_model.post_layernorm.")
"""Behind the feature layer, the last but one."""


def test_every_missing_weight_is_an_error(llava: Any, checkpoint: Path, weights: Weights, tmp_path: Path) -> None:
    """Each of them by itself, but those that the model does not use; also through vLLM's own loader."""
    model = new_model(checkpoint, tmp_path)
    refused = []
    for name in weights:
        rest = {key: weight for key, weight in weights.items() if key != name}
        if name.startswith(UNUSED):
            model.load_weights(rest.items())
            continue
        with pytest.raises(ValueError, match=re.escape(name.replace("vision_model.", ""))):
            model.load_weights(rest.items())
        refused.append(name)
    assert len(refused) == len(weights) - 18 > 50
    del rest["language_model.model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"llava_like.load_weights: .*layers\.0\.self_attn\.k_proj\.weight.*missing"):
        load_model(checkpoint, tmp_path, rest)


@pytest.mark.parametrize(
    "name",
    [
        "more.weight",
        "multi_modal_projector.linear_3.weight",
        "multi_modal_projector.linear_3.bias",
        "language_model.lm_head.bias",
        "language_model.model.layers.0.self_attn.q_proj.bias",
        "language_model.model.layers.2.mlp.gate_proj.weight",
        "language_model.model.more.weight",
        "vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight",
        "vision_tower.vision_model.encoder.layers.0.mlp.fc3.bias",
        "vision_tower.vision_model.more.bias",
    ],
)
def test_every_unexpected_weight_is_an_error(
    llava: Any, checkpoint: Path, weights: Weights, tmp_path: Path, name: str
) -> None:
    """Also where vLLM would pass over it: biases, and layers of the vision tower."""
    with pytest.raises(ValueError, match=r"unexpected|no module or parameter"):
        load_model(checkpoint, tmp_path, {**weights, name: torch.zeros(1)})


def test_several_feature_layers_are_refused(llava: Any, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"expected a clip_vision_model and one vision_feature_layer, got .*\[-2, -1\]"
    ):
        new_model(checkpoint, tmp_path, vision_feature_layer=[-2, -1])
