"""The model in vLLM, in this process's own engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .waves import ANSWER_WORDS, PROMPT


@contextmanager
def engine(checkpoint: Path | str, **options: Any) -> Iterator[Any]:
    """Start a `vllm.LLM` that ends with the block.

    Args:
        checkpoint: its folder.
        options: passed on to `vllm.LLM`.
    """
    from vllm import LLM

    llm = LLM(str(checkpoint), **{"dtype": "float32", "max_model_len": 128, "use_tqdm_on_load": False, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def answer(llm: Any, series: Sequence[Any]) -> list[list[int]]:
    """Return greedy ids of the answer about each series."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_WORDS)
    requests = [{"prompt": PROMPT, "multi_modal_data": {"series": item}} for item in series]
    results = llm.generate(requests, sampling, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]
