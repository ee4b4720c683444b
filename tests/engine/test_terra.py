"""Terra in the real engine: parity with the reference, accuracy, prefix caching, refusals, tensor parallelism."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.terra import CHECKPOINT, register
from examples.terra.configuration import LlamaActionConfig
from examples.terra.reference import LlamaActionForCausalLM
from examples.terra.spec import TERRA
from examples.terra.world import Episode, make_episode
from mmkit import InputError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PAD = 31
PARITY_SEEDS = range(100, 105)
ACCURACY_SEEDS = range(200, 220)


@pytest.fixture(scope="module")
def terra() -> Iterator[Any]:
    """One engine in this process for the whole module."""
    with pytest.MonkeyPatch.context() as env:
        env.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        env.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        from examples.terra.rollout import VllmTerra

        register()
        made = VllmTerra(CHECKPOINT, dtype="float32", seed=0)
        yield made
        # not when the collector finds it, in the middle of another engine's start
        made.llm.llm_engine.engine_core.shutdown()


def stacked(seeds: range) -> tuple[np.ndarray, np.ndarray]:
    """Frames (streams, 25, 64) and actions (streams, 24, 6, 3) of held-out episodes."""
    episodes = [make_episode(seed) for seed in seeds]
    return np.stack([e.frames for e in episodes]), np.stack([e.actions for e in episodes])


def rollout(terra: Any, frames: np.ndarray, actions: np.ndarray, count: int = 22) -> np.ndarray:
    """Generated tokens, (streams, count, 64)."""
    return np.stack([step.tokens for step in terra.rollout(frames[:, :3], actions, count)], axis=1)


def test_spec_is_short() -> None:
    assert len(Path(sys.modules[TERRA._module].__file__ or "").read_text().splitlines()) <= 30


def test_greedy_ids_are_those_of_the_reference(terra: Any) -> None:
    """Complete 22-frame rollouts of 5 episodes, float32."""
    frames, actions = stacked(PARITY_SEEDS)
    reference = LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()
    wanted = list(reference.rollout(torch.from_numpy(frames[:, :3]), torch.from_numpy(actions), 22))
    got = rollout(terra, frames, actions)
    assert got.shape == (5, 22, 64)
    assert np.array_equal(got, torch.stack(wanted, dim=1).numpy())


def test_follows_the_world_and_its_actions(terra: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """20 episodes never trained on; then the same with the actions of each episode shuffled."""
    frames, actions = stacked(ACCURACY_SEEDS)
    shuffled = np.stack([a[np.random.default_rng(i).permutation(len(a))] for i, a in enumerate(actions)])
    accuracy = float((rollout(terra, frames, actions) == frames[:, 3:]).mean())
    accuracy_shuffled = float((rollout(terra, frames, shuffled) == frames[:, 3:]).mean())
    with capsys.disabled():
        print(f"\n20 held-out episodes, 22 frames: {accuracy:.2%} right, {accuracy_shuffled:.2%} with shuffled actions")
    assert accuracy >= 0.99
    assert accuracy_shuffled <= accuracy - 0.5


def test_prefix_cache_serves_the_history(terra: Any, capsys: pytest.CaptureFixture[str]) -> None:
    frames, actions = stacked(range(300, 301))
    steps = list(terra.rollout(frames[:, :3], actions, 22))[1:]
    share = sum(s.cached_tokens for s in steps) / sum(s.prompt_tokens for s in steps)
    least = min(s.cached_tokens / s.prompt_tokens for s in steps)
    with capsys.disabled():
        print(
            f"\nprefix cache: {share:.1%} of the prompt tokens of frames 2 to 22, at least {least:.1%} of each prompt"
        )
    assert share >= 0.95


def test_compiled_and_cached(terra: Any) -> None:
    from vllm.config import CompilationMode

    config = terra.llm.llm_engine.vllm_config
    assert not config.model_config.enforce_eager
    assert config.compilation_config.mode != CompilationMode.NONE
    assert config.cache_config.enable_prefix_caching


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_placeholder_is_never_sampled(terra: Any, temperature: float) -> None:
    """Not even when a caller pushes it as far as vLLM lets them."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=temperature, max_tokens=256, ignore_eos=True, detokenize=False, seed=0, logit_bias={PAD: 100.0}
    )
    (result,) = terra.llm.generate([request(make_episode(0))], sampling, use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 256
    assert PAD not in result.outputs[0].token_ids


# -- malformed requests --------------------------------------------------------------------------------------------


def prompt_of(episode: Episode, frames: int = 3) -> list[int]:
    return [token for frame in episode.frames[:frames].tolist() for token in [*frame, *[PAD] * 6]]


def request(episode: Episode, *, ids: Any = None, actions: Any = ...) -> dict[str, Any]:
    made = {"prompt_token_ids": prompt_of(episode) if ids is None else ids}
    if actions is not None:
        made["multi_modal_data"] = {"actions": list(episode.actions[:3]) if actions is ... else actions}
    return made


GOOD = make_episode(0)
ACTION = GOOD.actions[0]
PROMPT = prompt_of(GOOD)


def one_bad(value: Any) -> list[Any]:
    return [GOOD.actions[0], value, GOOD.actions[2]]


def with_value(value: float) -> np.ndarray:
    action = ACTION.copy()
    action[2, 1] = value
    return action


SHAPE = "terra.actions[1]: expected a (6, 3) float32 tensor, got shape {}. Send one tensor per item."
DTYPE = "terra.actions[1]: expected a (6, 3) float32 tensor, got dtype {}. Convert it to float32."
COUNT = (
    "terra.actions: expected {0} placeholder(s) [31] * 6 in the prompt for {0} items, got {1}, and {2} placeholder "
    "id(s) in all. Write one placeholder per item, and nothing else with its id."
)
BARE = (
    "terra.actions: expected one item per placeholder, got {} placeholder id(s) 31 and no item. "
    'Send multi_modal_data={{"actions": [...]}}, or leave the placeholders out.'
)
BAD_ID = "terra.prompt[{}]: expected a token id from 0 to 31, got {}. Check the tokenizer."

MALFORMED = {
    "five rows": (request(GOOD, actions=one_bad(ACTION[:5])), SHAPE.format("(5, 3)")),
    "seven rows": (request(GOOD, actions=one_bad(np.zeros((7, 3), np.float32))), SHAPE.format("(7, 3)")),
    "four columns": (request(GOOD, actions=one_bad(np.zeros((6, 4), np.float32))), SHAPE.format("(6, 4)")),
    "transposed": (request(GOOD, actions=one_bad(ACTION.T)), SHAPE.format("(3, 6)")),
    "rank 1": (request(GOOD, actions=one_bad(ACTION.ravel())), SHAPE.format("(18,)")),
    "rank 3": (request(GOOD, actions=one_bad(ACTION[None])), SHAPE.format("(1, 6, 3)")),
    "scalar": (request(GOOD, actions=one_bad(np.float32(1))), SHAPE.format("()")),
    "empty tensor": (request(GOOD, actions=one_bad(np.zeros((0,), np.float32))), SHAPE.format("(0,)")),
    "no rows": (request(GOOD, actions=one_bad(np.zeros((0, 3), np.float32))), SHAPE.format("(0, 3)")),
    "NaN": (
        request(GOOD, actions=one_bad(with_value(np.nan))),
        "terra.actions[1]: expected finite values of magnitude <= 1000, got nan at [2, 1].",
    ),
    "infinite": (
        request(GOOD, actions=one_bad(with_value(-np.inf))),
        "terra.actions[1]: expected finite values of magnitude <= 1000, got -inf at [2, 1].",
    ),
    "huge": (
        request(GOOD, actions=one_bad(with_value(1e38))),
        "terra.actions[1]: expected finite values of magnitude <= 1000, got 1e+38 at [2, 1]. Check the units.",
    ),
    "complex": (request(GOOD, actions=one_bad(ACTION.astype(np.complex64))), DTYPE.format("complex64")),
    "bool": (request(GOOD, actions=one_bad(ACTION > 0)), DTYPE.format("bool")),
    "integer": (request(GOOD, actions=one_bad(ACTION.astype(np.int32))), DTYPE.format("int32")),
    "a None item": (
        request(GOOD, actions=one_bad(None)),
        "terra.actions[1]: expected a (6, 3) float32 tensor, got None. "
        "Send the item, or the uuid of a cached one in multi_modal_uuids.",
    ),
    "a string": (
        request(GOOD, actions=one_bad("x")),
        "terra.actions[1]: expected a (6, 3) float32 tensor, got str 'x'.",
    ),
    "a ragged list": (
        request(GOOD, actions=one_bad([[0.0, 1.0, 2.0], [0.0]])),
        "terra.actions[1]: expected a (6, 3) float32 tensor, got a ragged list.",
    ),
    "no items": (
        request(GOOD, actions=[]),
        "terra.actions: expected at least one item, got none. Send the items, or leave the modality out.",
    ),
    "None": (
        request(GOOD, actions=None) | {"multi_modal_data": {"actions": None}},
        "terra.actions: expected a (6, 3) float32 tensor or a list of them, got None. "
        "Send the item, or leave the modality out.",
    ),
    "one item short": (request(GOOD, actions=list(GOOD.actions[:2])), COUNT.format(2, 3, 18)),
    "one item too many": (request(GOOD, actions=list(GOOD.actions[:4])), COUNT.format(4, 3, 18)),
    "more items than the model holds": (
        request(GOOD, actions=[ACTION] * 25),
        "terra.actions: expected at most 24 item(s), got 25. Send fewer items.",
    ),
    "a placeholder run cut short": (request(GOOD, ids=PROMPT[:-1]), COUNT.format(3, 2, 17)),
    "a placeholder too many": (request(GOOD, ids=[*PROMPT, PAD]), COUNT.format(3, 3, 19)),
    "placeholders without data": (request(GOOD, actions=None), BARE.format(18)),
    "placeholders and empty data": (request(GOOD, actions=None) | {"multi_modal_data": {}}, BARE.format(18)),
    "an unknown modality": (
        request(GOOD, actions=None) | {"multi_modal_data": {"image": [ACTION]}},
        "terra.multi_modal_data: expected modalities among ['actions'], got 'image'.",
    ),
    "an id past the vocabulary": (request(GOOD, ids=[32, *PROMPT[1:]]), BAD_ID.format(0, 32)),
    "the same without items": (request(GOOD, ids=[1, 2, 32], actions=None), BAD_ID.format(2, 32)),
    "a negative id": (request(GOOD, ids=[-1, *PROMPT[1:]]), BAD_ID.format(0, -1)),
    "a negative id without items": (request(GOOD, ids=[1, -1], actions=None), BAD_ID.format(1, -1)),
    "id 2^31": (request(GOOD, ids=[2**31, 1], actions=None), BAD_ID.format(0, 2**31)),
    "a fractional id": (
        request(GOOD, ids=[1, 1.5], actions=None),
        "terra.prompt[1]: expected a token id, got float 1.5. Send integers.",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused(terra: Any, name: str) -> None:
    """Before the engine, by one sentence; the next good request gives the same ids as before."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)

    def generate(prompt: dict[str, Any]) -> list[int]:
        (result,) = terra.llm.generate([prompt], sampling, use_tqdm=False)
        return list(result.outputs[0].token_ids)

    before = generate(request(GOOD))
    bad, sentence = MALFORMED[name]
    with pytest.raises(InputError) as refusal:
        generate(bad)
    assert str(refusal.value) == sentence
    assert not terra.llm.llm_engine.has_unfinished_requests()
    assert generate(request(GOOD)) == before == make_episode(0).frames[3].tolist()


@pytest.mark.parametrize("ids", [[PAD] * 6, [1, 2, 40], [1, -5, 2], [2**31 - 1], [PAD, 32, -1] * 20], ids=str)
def test_ids_that_pass_no_processor_do_no_harm(terra: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendered inputs skip every check but that of the guard; without it, the engine and its other requests must
    survive them."""
    from vllm import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    engine = terra.llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    rendered = {"type": "token", "prompt_token_ids": ids}
    with pytest.raises(InputError, match=r"^terra\.(prompt\[\d+\]|actions): expected "):
        engine.add_request(f"guarded {ids}", rendered, sampling)
    monkeypatch.setattr(InputProcessor, "process_inputs", InputProcessor.process_inputs.__wrapped__)
    engine.add_request(f"raw {ids}", rendered, sampling)
    finished = []
    for _ in range(20):
        finished += [output for output in engine.step() if output.finished]
        if finished:
            break
    assert len(finished[0].outputs[0].token_ids) == 4
    frames, actions = stacked(range(1))
    assert np.array_equal(rollout(terra, frames, actions, 2), frames[:, 3:5])


# -- other checkpoints and processes -------------------------------------------------------------------------------


def run_demo(out: Path, *options: str) -> dict[str, Any]:
    """The command line in a process of its own, with the engine and its workers in further processes."""
    command = [sys.executable, "-m", "examples.terra", "--out", str(out), *options]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {p.name for p in out.iterdir()} == {"terra.gif", "terra.png", "terra.json"}
    report: dict[str, Any] = json.loads((out / "terra.json").read_text())
    return report


def test_tensor_parallel_gives_the_same_ids(tmp_path: Path) -> None:
    """Two processes share each layer; two streams at once."""
    report = run_demo(tmp_path, "--tensor-parallel-size", "2", "--streams", "2", "--frames", "4", "--seed", "7")
    assert report["identical_tokens"]
    assert report["vLLM"]["token_accuracy"] == 1.0


PUBLISHED = {"vocab_size": 262_145, "num_image_patches": 576, "num_spatio_embeddings": 582, "pad_token_id": 262_144}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published layout and parameter names, with a narrow hidden size and random weights."""
    torch.manual_seed(0)
    config = LlamaActionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1,
        head_dim=32, architectures=["LlamaActionForCausalLM"], dtype="float32", **PUBLISHED,
    )  # fmt: skip
    assert (config.num_temporal_embeddings, config.num_action_tokens, config.action_dim) == (25, 6, 3)
    path = tmp_path_factory.mktemp("published")
    LlamaActionForCausalLM(config).save_pretrained(path)
    return path


def test_published_names(published: Path) -> None:
    """The reference has exactly the published names, with the published sizes where the layout sets them."""
    with torch.device("meta"):
        state = LlamaActionForCausalLM(LlamaActionConfig()).state_dict()
    assert state["model.embed_tokens.weight"].shape == state["lm_head.weight"].shape == (262_145, 2048)
    assert state["pos_embedding_spatio_temporal.spatio_embeddings.weight"].shape == (582, 2048)
    assert state["pos_embedding_spatio_temporal.temporal_embeddings.weight"].shape == (25, 2048)
    assert state["action_projection.weight"].shape == (2048, 3)
    assert state["action_projection.bias"].shape == (2048,)
    others = {name for name in state if not name.startswith(("model.", "pos_embedding_spatio_temporal."))}
    assert others == {"lm_head.weight", "action_projection.weight", "action_projection.bias"}
    assert sum(tensor.numel() for tensor in state.values()) == pytest.approx(2.04e9, rel=0.01)


def test_published_layout_runs(published: Path, tmp_path: Path) -> None:
    """Frames of 576 tokens in the CPU engine, identical to the reference: so the published names load completely."""
    report = run_demo(tmp_path, "--model", str(published), "--frames", "2")
    assert report["vLLM"]["prompt_tokens"] == [3 * 582, 4 * 582]
    assert report["vLLM"]["cached_tokens"][1] >= 0.95 * 4 * 582
    assert report["identical_tokens"]
    assert "token_accuracy" not in report["vLLM"]


@pytest.mark.parametrize(
    ("change", "fault"), [("missing", "not initialized"), ("unexpected", "no module or parameter")]
)
def test_incomplete_checkpoints_are_refused(published: Path, tmp_path: Path, change: str, fault: str) -> None:
    """A state dict with a name too few or too many does not load."""
    from safetensors.torch import load_file, save_file

    state = load_file(published / "model.safetensors")
    if change == "missing":
        del state["pos_embedding_spatio_temporal.temporal_embeddings.weight"]
    else:
        state["pos_embedding_spatio_temporal.more.weight"] = torch.zeros(1)
    broken = tmp_path / "model"
    broken.mkdir()
    save_file(state, broken / "model.safetensors", {"format": "pt"})
    (broken / "config.json").write_text((published / "config.json").read_text())
    with pytest.raises(AssertionError, match=fault):
        run_demo(tmp_path / "out", "--model", str(broken), "--frames", "1", "--no-reference")
