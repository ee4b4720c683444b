"""Score a checkpoint in transformers, without a server: ``python -m examples.vowels.score CHECKPOINT``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from . import CHECKPOINT
from .recordings import count_right, load_recordings


def answer_all(checkpoint: Path) -> list[str]:
    """Return the answers of a checkpoint about the recordings for the test."""
    from transformers import PreTrainedTokenizerFast

    from .model import VowelsForCausalLM
    from .spec import VOWELS

    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    model: Any = VowelsForCausalLM.from_pretrained(checkpoint).eval()
    processor = VOWELS.hf_processor(model.config, tokenizer)
    return [model.answer(processor, recording.frames) for recording in load_recordings("test")]


def main(checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")] = CHECKPOINT) -> None:
    """Print how many answers about the recordings for the test are right."""
    answers = answer_all(checkpoint)
    print(f"{count_right(answers, load_recordings('test'))} of {len(answers)} right")


if __name__ == "__main__":
    typer.run(main)
