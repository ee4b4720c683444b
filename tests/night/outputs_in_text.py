"""The time-series model with outputs that stand in a text, and an account of which answers are legal."""

from pathlib import Path
from typing import Any

from examples.series.model import WavesForCausalLM
from examples.series.spec import WAVES
from examples.series.untrained import make_model, make_tokenizer
from mmkit import Output, any_id, cfg, tok

BEGIN, END = "<action>", "</action>"
LEVELS = 16
MOST = 3


def decode_levels(ids: Any, scope: Any) -> Any:
    """Ids (3 * units,) to levels, int64 (units, 3)."""
    levels: Any = ids.reshape(-1, 3) - scope.cfg.first_level
    return levels - [0, LEVELS, 2 * LEVELS]


def encode_levels(levels: Any, scope: Any) -> Any:
    return (levels + [0, LEVELS, 2 * LEVELS]).reshape(-1) + scope.cfg.first_level


def choose_level(number: int) -> Any:
    """Return a position with the ids of one of the three levels of a unit."""
    first = cfg.first_level + number * LEVELS
    return any_id(first, first + LEVELS)


UNIT = choose_level(0) + choose_level(1) + choose_level(2)
FUNCTIONS = (decode_levels, encode_levels)
ACTION = Output("action", UNIT, *FUNCTIONS, after=tok[BEGIN], until=tok[END], most=MOST)
STEP = Output("step", UNIT, *FUNCTIONS, after=tok[BEGIN])
LAST = Output("last", UNIT, *FUNCTIONS, after=tok[BEGIN], until=tok["</s>"], most=MOST)
WHOLE = Output("whole", UNIT, *FUNCTIONS)
SPEAKING = WAVES.model_copy(update={"name": "speaking", "outputs": [ACTION, STEP, LAST, WHOLE]})


@SPEAKING.register
class SpeakingForCausalLM(WavesForCausalLM):
    """A time-series model that may act in its answers."""


def write_checkpoint(folder: Path, template: str) -> None:
    """Write a checkpoint of random weights, whose answers have much variety."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<series>", "<patch>", BEGIN, END]})
    tokenizer.add_tokens([f"[{number}]" for number in range(3 * LEVELS)])
    tokenizer.chat_template = template
    model = make_model(seed=0, vocab_size=len(tokenizer))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    model.config.architectures = [SpeakingForCausalLM.__name__]
    model.config.first_level = tokenizer.convert_tokens_to_ids("[0]")
    model.save_pretrained(folder)
    # save_pretrained writes the name of the class that it saves
    config = folder / "config.json"
    text = config.read_text()
    config.write_text(text.replace(f'"{WavesForCausalLM.__name__}"', f'"{SpeakingForCausalLM.__name__}"'))
    tokenizer.save_pretrained(folder)


def find_illegal_id(ids: list[int], *, begin: int, end: int | None, first_level: int) -> int | None:
    """Return the position of the first id that breaks the rule of an output; None if none does.

    This is an account of the rule of its own: the three levels in turn, then the end, or the next unit.
    """
    num_levels: int | None = None
    for position, token in enumerate(ids):
        if num_levels is None:
            if token == begin:
                num_levels = 0
            continue
        is_border = num_levels > 0 and num_levels % 3 == 0
        if end is None and is_border:
            num_levels = 0 if token == begin else None
            continue
        if token == end and is_border:
            num_levels = None
            continue
        first = first_level + num_levels % 3 * LEVELS
        most = 1 if end is None else MOST
        if not first <= token < first + LEVELS or num_levels == 3 * most:
            return position
        num_levels += 1
    return None
