"""Rollouts: the ids of the reference, the world that the model was trained on, caches, drafts, the demo."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.terra import CHECKPOINT
from examples.terra import __main__ as demo
from examples.terra.reference import LlamaActionForCausalLM
from examples.terra.world import make_episode

from .rollouts import PAD, generate, request, stacked


@pytest.fixture(scope="module")
def held_out(terra: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Frames and actions of 20 episodes that the model was not trained on, and what it generates: 22 frames of each."""
    frames, actions = stacked(range(200, 220))
    return frames, actions, generate(terra, frames, actions)


def test_greedy_ids_are_those_of_the_reference(held_out: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Complete rollouts of 5 episodes, float32."""
    frames, actions, tokens = held_out
    assert tokens.shape == (20, 22, 64)
    reference = LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()
    expected = list(reference.rollout(torch.from_numpy(frames[:5, :3]), torch.from_numpy(actions[:5]), 22))
    assert np.array_equal(tokens[:5], torch.stack(expected, dim=1).numpy())


def test_follows_the_world_and_its_actions(
    terra: Any, held_out: tuple[np.ndarray, np.ndarray, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    """And something else with the actions of each episode shuffled."""
    frames, actions, tokens = held_out
    shuffled = np.stack([a[np.random.default_rng(i).permutation(len(a))] for i, a in enumerate(actions)])
    accuracy = float((tokens == frames[:, 3:]).mean())
    accuracy_shuffled = float((generate(terra, frames, shuffled) == frames[:, 3:]).mean())
    with capsys.disabled():
        print(f"\n20 held-out episodes, 22 frames: {accuracy:.2%} right, {accuracy_shuffled:.2%} with shuffled actions")
    assert accuracy >= 0.99
    assert accuracy_shuffled <= accuracy - 0.5


def test_prefix_cache_serves_the_history(terra: Any, capsys: pytest.CaptureFixture[str]) -> None:
    frames, actions = stacked(range(300, 301))
    steps = list(terra.rollout(frames[:, :3], actions, 22))[1:]
    share = sum(s.cached_tokens for s in steps) / sum(s.prompt_tokens for s in steps)
    with capsys.disabled():
        print(f"\nprefix cache: {share:.1%} of the prompt tokens of frames 2 to 22")
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


def test_the_demo(terra: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, with the engine that is there."""
    monkeypatch.setattr("examples.terra.rollout.VllmTerra", lambda *args, **options: terra)
    demo.main(frames=2, streams=2, seed=7, out=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"terra.gif", "terra.png", "terra.json"}
    report = json.loads((tmp_path / "terra.json").read_text())
    assert report["identical_tokens"]
    assert report["vLLM"]["token_accuracy"] == 1.0
    assert report["vLLM"]["prompt_tokens"] == [3 * 70, 4 * 70]
