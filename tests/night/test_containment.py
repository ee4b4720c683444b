"""The law `containment` in the real engine, in all dtypes: whatever one request brings, others get the ids that they
got before."""

from contextlib import ExitStack
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.llava_like.cases import draw_picture
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.offline import answer, engine

PROMPT = "USER: <image> what"
TEXT, GOOD = {"prompt": "USER: hello"}, {"prompt": PROMPT, "multi_modal_data": {"image": draw_picture(0)}}
EXTREME = [
    {"prompt": PROMPT, "multi_modal_data": {"image": torch.full((1, 16, 64), value)}} for value in (65504.0, -16384.0)
]
# few blocks, so that all of them are used again
SIZES = {"num_gpu_blocks_override": 16, "gpu_memory_utilization": 0.3, "max_model_len": 256}


def of_value(self: Any, inherited: Any, value: float, **fields: Any) -> list[torch.Tensor]:
    """Rows of the right number, of a value and its negative in turn."""
    rows = [torch.full_like(row, value) for row in inherited(self, **fields)]
    for row in rows:
        row[:, ::2] *= -1
    return rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_request_changes_the_answers_of_others(dtype: str, tmp_path: Path, engines: ExitStack) -> None:
    """The ids of a request without items and of a good one are the same before and after each extreme one, as are those
    beside it in a batch; and all that the KV cache holds is finite."""
    options = {"dtype": dtype, "enforce_eager": True, "enable_prefix_caching": False, **SIZES}
    llm = engines.enter_context(engine(make_checkpoint(tmp_path), **options))
    worker = llm.llm_engine.model_executor.driver_worker.worker
    expected = answer(llm, [TEXT, GOOD])

    def compare() -> None:
        assert all(bool(torch.isfinite(cache).all()) for cache in worker.model_runner.kv_caches)
        assert answer(llm, [TEXT, GOOD]) == expected

    def forget() -> None:
        """The encoder is asked again."""
        llm.llm_engine.reset_encoder_cache()
        llm.reset_mm_cache()

    for extreme in EXTREME:
        answer(llm, [extreme])
        compare()
        assert answer(llm, [TEXT, extreme, GOOD])[::2] == expected
    model = type(worker.get_model())
    for value in (torch.nan, torch.inf, 16384.0, torch.finfo(getattr(torch, dtype)).max):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "embed_image", partialmethod(of_value, model.embed_image, value))
            forget()
            answer(llm, [GOOD])
        forget()
        compare()
