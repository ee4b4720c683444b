"""The law `containment` in the real engine, in all dtypes: whatever one request brings, others get the ids that they
got before."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.llava_like import ARCHITECTURE, register
from examples.llava_like.cases import draw_picture
from examples.llava_like.checkpoint import make_checkpoint
from tests.engine.processes import engines_in_this_process

PROMPT, TEXT = "USER: <image> what", "USER: hello"
GOOD = {"prompt": PROMPT, "multi_modal_data": {"image": draw_picture(0)}}
EXTREME = [
    {"prompt": PROMPT, "multi_modal_data": {"image": torch.full((1, 16, 64), value)}} for value in (65504.0, -16384.0)
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_request_changes_the_answers_of_others(dtype: str, tmp_path: Path) -> None:
    """The ids of a request without items and of a good one are the same before and after each extreme one, as are those
    beside it in a batch; and all that the KV cache holds is finite."""
    register()
    with engines_in_this_process() as engines:
        from vllm import LLM, SamplingParams

        # few blocks, so that all of them are used again
        sizes = {"num_gpu_blocks_override": 16, "gpu_memory_utilization": 0.3, "max_model_len": 256, "block_size": 32}
        options = {"enable_mm_embeds": True, "hf_overrides": {"architectures": [ARCHITECTURE]}, "enforce_eager": True}
        llm = LLM(str(make_checkpoint(tmp_path)), dtype=dtype, enable_prefix_caching=False, **sizes, **options)
        engines.callback(llm.llm_engine.engine_core.shutdown)
        worker = llm.llm_engine.model_executor.driver_worker.worker
        sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

        def answers(*requests: Any) -> list[list[int]]:
            results = llm.generate(list(requests), sampling, use_tqdm=False)
            return [list(result.outputs[0].token_ids) for result in results]

        def compare() -> None:
            assert all(bool(torch.isfinite(cache).all()) for cache in worker.model_runner.kv_caches)
            assert answers(TEXT, GOOD) == expected

        def forget() -> None:
            """The encoder is asked again."""
            llm.llm_engine.reset_encoder_cache()
            llm.reset_mm_cache()

        expected = answers(TEXT, GOOD)
        for extreme in EXTREME:
            answers(extreme)
            compare()
            assert answers(TEXT, extreme, GOOD)[::2] == expected
        for value in (torch.nan, torch.inf, 16384.0, torch.finfo(getattr(torch, dtype)).max):
            with encoder_that_returns(worker.get_model(), "embed_image", value):
                forget()
                answers(GOOD)
            forget()
            compare()


@contextmanager
def encoder_that_returns(model: Any, method: str, value: float) -> Iterator[None]:
    """Rows of the right number, of a value and its negative in turn."""
    inherited = getattr(type(model), method)

    def filled(self: Any, **fields: Any) -> list[torch.Tensor]:
        rows = [torch.full_like(row, value) for row in inherited(self, **fields)]
        for row in rows:
            row[:, ::2] *= -1
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), method, filled)
        yield
