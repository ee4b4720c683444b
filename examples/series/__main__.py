"""Ask vLLM about series that the model has never seen: ``python -m examples.series --help``."""

import os
from pathlib import Path
from typing import Annotated

import typer

from . import CHECKPOINT, register
from .waves import ANSWER_WORDS, FIRST_TEST_SEED, PROMPT, SHAPES, Wave, make_wave


def main(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder of a checkpoint; examples.series.train makes one.")
    ] = CHECKPOINT,
    count: Annotated[int, typer.Option(min=20, max=100_000, help="Series to ask about.")] = 200,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("series.svg"),
    log_level: Annotated[str, typer.Option(help="vLLM's log level.", envvar="VLLM_LOGGING_LEVEL")] = "ERROR",
) -> None:
    """Ask about held-out series in vLLM, about other series than those meant, and in the Hugging Face reference."""
    os.environ["VLLM_LOGGING_LEVEL"] = log_level
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM wants nearly all of a machine's memory

    from transformers import AutoTokenizer
    from transformers.utils import logging

    from .offline import answer, engine
    from .picture import draw
    from .reference import WavesForCausalLM
    from .spec import WAVES

    logging.disable_progress_bar()
    register()
    waves = [make_wave(seed) for seed in range(FIRST_TEST_SEED, FIRST_TEST_SEED + count)]
    series = [wave.series for wave in waves]
    with engine(checkpoint) as llm:
        ids = answer(llm, series)
        swapped = answer(llm, series[1:] + series[:1])
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = WavesForCausalLM.from_pretrained(checkpoint).eval()
    processor = WAVES.hf_processor(model.config, tokenizer)
    reference_ids = [model.answer(processor, PROMPT, steps, ANSWER_WORDS) for steps in series]
    texts = tokenizer.batch_decode(ids)
    examples = [find_wave(waves, shape) for shape in SHAPES]
    out.write_text(draw([series[i] for i in examples], [texts[i] for i in examples]))
    num_equal = sum(answer_ids == expected for answer_ids, expected in zip(ids, reference_ids, strict=True))
    print(f"answers right: {share(texts, waves):.1%} of {count}")
    print(f"with another series in its place: {share(tokenizer.batch_decode(swapped), waves):.1%} of {count}")
    print(f"same ids as the reference: {num_equal} of {count}")
    print(f"written: {out}")


def find_wave(waves: list[Wave], shape: str) -> int:
    """Return the index of the first wave of a shape."""
    for index, wave in enumerate(waves):
        if wave.answer.startswith(shape):
            return index
    raise ValueError(f"no {shape} among {len(waves)} waves")


def share(texts: list[str], waves: list[Wave]) -> float:
    """Return the share of answers that are right as a whole, shape and period."""
    return sum(text == wave.answer for text, wave in zip(texts, waves, strict=True)) / len(waves)


if __name__ == "__main__":
    typer.run(main)
