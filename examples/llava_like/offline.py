"""One LLaVA checkpoint in vLLM, as this package's model or as vLLM's own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import ARCHITECTURE


@contextmanager
def engine(model: Path, *, use_vllm_class: bool = False, **options: Any) -> Iterator[Any]:
    """Start a `vllm.LLM` that ends with the block, its processes with it.

    Args:
        model: folder of the checkpoint.
        use_vllm_class: run vLLM's own class, which the checkpoint names, instead of this package's.
        options: passed on to `vllm.LLM`.
    """
    from vllm import LLM

    options.setdefault("dtype", "float32")  # vLLM would run float32 checkpoints in 16 bits
    options.setdefault("block_size", 32)  # vLLM reuses full blocks only; CPUs take none smaller
    options.setdefault("enable_mm_embeds", True)
    options.setdefault("use_tqdm_on_load", False)
    if not use_vllm_class:
        options.setdefault("hf_overrides", {"architectures": [ARCHITECTURE]})
    llm = LLM(str(model), **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def answer(llm: Any, requests: Sequence[dict[str, Any]], max_tokens: int = 16) -> list[list[int]]:
    """Return greedy answers, as token ids."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    results = llm.generate(requests, sampling, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]
