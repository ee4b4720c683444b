"""The law `containment` in the real engine, two models in all dtypes: whatever one request brings, others get the ids
that they got before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.engine.processes import engines_in_this_process


class Case(NamedTuple):
    """A model, a request without items, a good one, and others that are accepted."""

    options: dict[str, Any]
    text: Any
    good: dict[str, Any]
    extreme: list[dict[str, Any]]


def of_terra(folder: Path) -> Case:
    from examples import terra

    terra.register()

    def request(value: float) -> dict[str, Any]:
        return {"prompt_token_ids": [14] * 64 + [31] * 6, "multi_modal_data": {"actions": torch.full((6, 3), value)}}

    options = {"model": str(terra.CHECKPOINT), "skip_tokenizer_init": True}
    return Case(options, {"prompt_token_ids": [14] * 40}, request(0.0), [request(1000.0), request(-1000.0)])


def of_llava_like(folder: Path) -> Case:
    from examples.llava_like import ARCHITECTURE, register
    from examples.llava_like.cases import draw_picture
    from examples.llava_like.checkpoint import make_checkpoint

    register()
    options = {"enable_mm_embeds": True, "hf_overrides": {"architectures": [ARCHITECTURE]}}
    prompt = "USER: <image> what"
    good = {"prompt": prompt, "multi_modal_data": {"image": draw_picture(0)}}
    rows = [torch.full((1, 16, 64), value) for value in (65504.0, -16384.0)]
    extreme = [{"prompt": prompt, "multi_modal_data": {"image": one}} for one in rows]
    return Case({"model": str(make_checkpoint(folder)), "block_size": 32, **options}, "USER: hello", good, extreme)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", [of_terra, of_llava_like])
def test_no_request_changes_the_answers_of_others(model: Callable[[Path], Case], dtype: str, tmp_path: Path) -> None:
    """The ids of a request without items and of a good one are the same before and after each extreme one, as are those
    beside it in a batch; and all that the KV cache holds is finite."""
    with engines_in_this_process() as engines:
        from vllm import LLM, SamplingParams

        case = model(tmp_path)
        # few blocks, so that all of them are used again
        sizes = {"num_gpu_blocks_override": 16, "gpu_memory_utilization": 0.3, "max_model_len": 256}
        llm = LLM(**{"dtype": dtype, "enforce_eager": True, "enable_prefix_caching": False, **sizes, **case.options})
        engines.callback(llm.llm_engine.engine_core.shutdown)
        worker = llm.llm_engine.model_executor.driver_worker.worker
        detokenize = "skip_tokenizer_init" not in case.options
        sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=detokenize)

        def answers(*requests: Any) -> list[list[int]]:
            results = llm.generate(list(requests), sampling, use_tqdm=False)
            return [list(result.outputs[0].token_ids) for result in results]

        def compare() -> None:
            assert all(bool(torch.isfinite(cache).all()) for cache in worker.model_runner.kv_caches)
            assert answers(case.text, case.good) == expected

        def forget() -> None:
            """The encoder is asked again."""
            llm.llm_engine.reset_encoder_cache()
            llm.reset_mm_cache()

        expected = answers(case.text, case.good)
        for extreme in case.extreme:
            answers(extreme)
            compare()
            assert answers(case.text, extreme, case.good)[::2] == expected
        (modality,) = worker.get_model().mm_spec.modalities
        for value in (torch.nan, torch.inf, 16384.0, torch.finfo(getattr(torch, dtype)).max):
            with encoder_that_returns(worker.get_model(), f"embed_{modality.name}", value):
                forget()
                answers(case.good)
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
