"""Rollouts of a Terra checkpoint in vLLM, frame by frame, with the whole history served from the prefix cache."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .configuration import LlamaActionConfig
from .drafts import make_speculative_config

BLOCK_SIZE = 32
"""Positions per block of the KV cache. Only full blocks are reused, and a frame has 70 positions; 32
is the smallest size that vLLM's attention on CPUs takes."""


@dataclass(frozen=True)
class GeneratedFrame:
    """One more frame of every stream.

    Attributes:
        tokens: int64 (streams, num_image_patches).
        seconds: wall time of the step, all streams together.
        prompt_tokens: prompt length, of the longest stream.
        cached_tokens: how many of them came from the prefix cache, the least of all streams.
    """

    tokens: np.ndarray
    seconds: float
    prompt_tokens: int
    cached_tokens: int


class Drive:
    """One stream, as far as the model reads it: frames, and the actions between them.

    Args:
        config: of the model.
        frames: integers (frames, num_image_patches), at least one.
        actions: float32 (frames - 1, num_action_tokens, action_dim).
        keep: the frames to go on from when the model is full, as in `LlamaActionConfig.falling`.
    """

    def __init__(
        self, config: LlamaActionConfig, frames: np.ndarray, actions: np.ndarray, keep: int | None = None
    ) -> None:
        self._config = config
        self._keep = keep
        self._frames = frames.tolist()
        self._actions = list(actions)

    def request(self, action: np.ndarray) -> dict[str, Any]:
        """Take an action, float32 (num_action_tokens, action_dim); return the request for the frame after it."""
        falling = self._config.falling(len(self._frames), self._keep)
        self._actions.append(action)
        del self._frames[:falling], self._actions[:falling]
        placeholders = [self._config.pad_token_id] * self._config.num_action_tokens
        prompt: list[int] = []
        for frame in self._frames:
            prompt += frame + placeholders
        return {"prompt_token_ids": prompt, "multi_modal_data": {"actions": list(self._actions)}}

    def add(self, frame: np.ndarray) -> None:
        """Take the frame after the last action, integers (num_image_patches,)."""
        self._frames.append(frame.tolist())


class VllmTerra:
    """A Terra checkpoint in vLLM.

    Args:
        model: directory of the checkpoint.
        tensor_parallel_size: number of processes that share each layer.
        drafts: the most tokens per stream that a step drafts from the stream's own frames; the model then checks them
            at once, so the ids are the same. 0 for none.
        options: passed on to `vllm.LLM`.
    """

    def __init__(self, model: Path | str, *, tensor_parallel_size: int = 1, drafts: int = 0, **options: Any) -> None:
        from transformers import AutoConfig
        from vllm import LLM

        if drafts:
            options["speculative_config"] = make_speculative_config(drafts)
        defaults = {
            "dtype": AutoConfig.from_pretrained(model).dtype,  # vLLM would run float32 checkpoints in 16 bits
            "skip_tokenizer_init": True,  # prompts are ids of image tokens
            "block_size": BLOCK_SIZE,
            "enable_prefix_caching": True,
            "tensor_parallel_size": tensor_parallel_size,
        }
        self.llm = LLM(str(model), **defaults | options)
        self.config = self.llm.model_config.hf_config

    def rollout(
        self, context: np.ndarray, actions: np.ndarray, num_frames: int, *, keep: int | None = None
    ) -> Iterator[GeneratedFrame]:
        """Generate frames one after the other, greedily, each from its own predecessors and the actions.

        Args:
            context: integers (streams, context frames, num_image_patches).
            actions: float32 (streams, context + num_frames - 1 or more, num_action_tokens, action_dim); action i leads
                from frame i to frame i + 1.
            num_frames: frames to generate.
            keep: the frames to go on from when the model is full, as in `LlamaActionConfig.falling`. None refuses more
                frames than the model holds.

        Yields:
            The next frame of all streams, as soon as it is complete.
        """
        num_context = context.shape[1]
        self.config.falling(num_context + num_frames - 1, keep)
        drives = []
        for frames, stream_actions in zip(context, actions, strict=True):
            drives.append(Drive(self.config, frames, stream_actions[: num_context - 1], keep))
        for index in range(num_context - 1, num_context - 1 + num_frames):
            yield self.step(drives, actions[:, index])

    def step(self, drives: Sequence[Drive], actions: np.ndarray) -> GeneratedFrame:
        """Generate the next frame of streams, greedily.

        Args:
            drives: the streams; they may be of different lengths.
            actions: float32 (streams, num_action_tokens, action_dim), which lead to the frame.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=self.config.num_image_patches, ignore_eos=True, detokenize=False
        )
        requests = [drive.request(action) for drive, action in zip(drives, actions, strict=True)]
        start = time.perf_counter()
        results = self.llm.generate(requests, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = np.array([result.outputs[0].token_ids for result in results], dtype=np.int64)
        for drive, frame in zip(drives, tokens, strict=True):
            drive.add(frame)
        return GeneratedFrame(
            tokens,
            seconds,
            max(len(request["prompt_token_ids"]) for request in requests),
            min(result.num_cached_tokens or 0 for result in results),
        )
