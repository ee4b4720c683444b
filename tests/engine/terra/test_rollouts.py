"""Rollouts: the ids of the reference, the world that the model was trained on, caches, drafts, the demo."""

import json
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.terra import CHECKPOINT
from examples.terra import __main__ as demo
from examples.terra.drafts import FRAME_TOKENS
from examples.terra.reference import LlamaActionForCausalLM
from examples.terra.world import make_episode

from .rollouts import PAD, engine, generate, request, shuffled, stacked


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


def test_a_window_slides_as_in_the_reference(terra: Any) -> None:
    """Three slides, the last one before the last frame; the model goes on as well as before."""
    episodes = [make_episode(seed, num_frames=36) for seed in (200, 201)]
    frames, actions = np.stack([e.frames for e in episodes]), np.stack([e.actions for e in episodes])
    steps = list(terra.rollout(frames[:, :3], actions, 33, keep=20))
    tokens = np.stack([step.tokens for step in steps], axis=1)
    reference = LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()
    expected = reference.rollout(torch.from_numpy(frames[:, :3]), torch.from_numpy(actions), 33, keep=20)
    assert np.array_equal(tokens, torch.stack(list(expected), dim=1).numpy())
    assert (tokens == frames[:, 3:]).mean() >= 0.99
    assert [step.prompt_tokens // 70 for step in steps] == [*range(3, 25), *range(20, 25), *range(20, 25), 20]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (None, "The model holds at most 25 frames, not 26. Say how many to keep."),
        (0, "keep must be from 1 to 24 frames, not 0."),
        (25, "keep must be from 1 to 24 frames, not 25."),
    ],
)
def test_more_frames_than_the_model_holds_need_a_window(terra: Any, keep: int | None, message: str) -> None:
    frames, actions = stacked(range(200, 201))
    reference = LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()
    for rollout, of in ((terra.rollout, np.asarray), (reference.rollout, torch.from_numpy)):
        with pytest.raises(ValueError) as caught:
            next(rollout(of(frames[:, :3]), of(actions), 23, keep=keep))
        assert str(caught.value) == message


def test_follows_the_world_and_its_actions(
    terra: Any, held_out: tuple[np.ndarray, np.ndarray, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    """And something else with the actions of each episode shuffled."""
    frames, actions, tokens = held_out
    accuracy = float((tokens == frames[:, 3:]).mean())
    accuracy_shuffled = float((generate(terra, frames, shuffled(actions)) == frames[:, 3:]).mean())
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


@pytest.fixture(scope="module")
def drafting(engines: ExitStack) -> Any:
    """An engine that drafts frames."""
    return engine(engines, drafts=FRAME_TOKENS)


def test_drafts_of_frames_save_steps_and_change_no_id(
    drafting: Any, held_out: tuple[np.ndarray, np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams one by one, to the last frame that the model holds, and 20 at once."""
    frames, actions, tokens = held_out
    assert np.array_equal(generate(drafting, frames, actions), tokens)
    steps, step = count(), drafting.llm.llm_engine.step
    monkeypatch.setattr(drafting.llm.llm_engine, "step", lambda: (next(steps), step())[1])
    for one in range(3):
        only = slice(one, one + 1)
        assert np.array_equal(generate(drafting, frames[only], actions[only]), tokens[only])
    assert next(steps) <= 5 * 3 * 22


def test_placeholder_is_never_sampled_beside_drafts(
    drafting: Any, held_out: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """vLLM makes no logits processors for drafts, and takes no bias, so here the model itself wants the placeholder."""

    def wanted(module: torch.nn.Module, arguments: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([PAD]), 1e4)

    frames, actions, tokens = held_out
    (hook,) = drafting.llm.apply_model(lambda model: model.logits_processor.register_forward_hook(wanted))
    assert np.array_equal(generate(drafting, frames[:1], actions[:1], 3), tokens[:1, :3])
    hook.remove()


def test_the_demo(drafting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, with the engine that is there."""
    monkeypatch.setattr("examples.terra.rollout.VllmTerra", lambda *args, **options: drafting)
    demo.main(model=CHECKPOINT, frames=2, streams=2, seed=7, out=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"terra.gif", "terra.mp4", "terra.png", "terra.json"}
    report = json.loads((tmp_path / "terra.json").read_text())
    assert report["identical_tokens"]
    assert report["vLLM"]["token_accuracy"] == 1.0
    assert report["vLLM"]["prompt_tokens"] == [3 * 70, 4 * 70]
