"""Rollouts of a Terra checkpoint in vLLM, frame by frame, with the whole history served from the prefix cache."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_SIZE = 32
"""Positions per block of the KV cache. Only full blocks are reused, and a frame of the road world has 70 positions; 32
is the smallest size that vLLM's attention on CPUs takes."""


@dataclass(frozen=True)
class GeneratedFrame:
    """One more frame of every stream.

    Attributes:
        tokens: int64 (streams, num_image_patches).
        seconds: wall time of the step, all streams together.
        prompt_tokens: prompt length, of one stream.
        cached_tokens: how many of them came from the prefix cache, the least of all streams.
    """

    tokens: np.ndarray
    seconds: float
    prompt_tokens: int
    cached_tokens: int


class VllmTerra:
    """A Terra checkpoint in vLLM.

    Args:
        model: directory of the checkpoint.
        tensor_parallel_size: number of processes that share each layer.
        drafts: tokens that a step drafts from what followed the last ones before, in the stream's own history; the
            model then checks them at once, so the ids are the same. 0 for none. Worth it where frames resemble each
            other and the engine waits for steps rather than for arithmetic.
        options: passed on to `vllm.LLM`.
    """

    def __init__(self, model: Path | str, *, tensor_parallel_size: int = 1, drafts: int = 0, **options: Any) -> None:
        from transformers import AutoConfig
        from vllm import LLM

        if drafts:
            lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 6}
            options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts, **lookup}
        self.llm = LLM(
            **{
                "model": str(model),
                "dtype": AutoConfig.from_pretrained(model).dtype,  # vLLM would run float32 checkpoints in 16 bits
                "skip_tokenizer_init": True,  # prompts are ids of image tokens
                "block_size": BLOCK_SIZE,
                "enable_prefix_caching": True,
                "tensor_parallel_size": tensor_parallel_size,
                **options,
            }
        )
        self.config = self.llm.model_config.hf_config

    def rollout(self, context: np.ndarray, actions: np.ndarray, num_frames: int) -> Iterator[GeneratedFrame]:
        """Generate frames one after the other, greedily, each from its own predecessors and the actions.

        Args:
            context: integers (streams, context frames, num_image_patches).
            actions: float32 (streams, context + num_frames - 1 or more, num_action_tokens, action_dim); action i leads
                from frame i to frame i + 1.
            num_frames: frames to generate.

        Yields:
            The next frame of all streams, as soon as it is complete.
        """
        from vllm import SamplingParams

        config = self.config
        sampling = SamplingParams(
            temperature=0.0, max_tokens=config.num_image_patches, ignore_eos=True, detokenize=False
        )
        placeholders = [config.pad_token_id] * config.num_action_tokens
        prompts = [[token for frame in stream.tolist() for token in [*frame, *placeholders]] for stream in context]
        for known in range(context.shape[1], context.shape[1] + num_frames):
            requests = [
                {"prompt_token_ids": prompt, "multi_modal_data": {"actions": list(stream_actions[:known])}}
                for prompt, stream_actions in zip(prompts, actions, strict=True)
            ]
            start = time.perf_counter()
            results = self.llm.generate(requests, sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
            tokens = [list(result.outputs[0].token_ids) for result in results]
            yield GeneratedFrame(
                np.array(tokens, dtype=np.int64),
                seconds,
                len(prompts[0]),
                min(result.num_cached_tokens or 0 for result in results),
            )
            prompts = [[*prompt, *frame, *placeholders] for prompt, frame in zip(prompts, tokens, strict=True)]
