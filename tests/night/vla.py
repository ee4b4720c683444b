"""The vision-language-action model with one more output, whose positions have different ids."""

from typing import Any

from examples.vla.model import VlaForActionPrediction
from examples.vla.spec import VLA
from mmkit import Output, any_id, cfg, literal, tok

SIZE = cfg.text_config.vocab_size - cfg.pad_to_multiple_of
# ids that the model would hardly choose there
CELL = any_id(40, 44) + any_id(SIZE - 3, SIZE)
ROW = CELL * 3 + tok["a"]
LAYOUT = ROW * 4 + literal(tok["</s>"])


def decode_table(ids: Any, scope: Any) -> Any:
    return ids.reshape(4, 3, 2)


TABLE = Output("table", LAYOUT, decode_table)
WITH_TABLES = VLA.model_copy(update={"outputs": list(VLA.outputs) + [TABLE]})


@WITH_TABLES.register
class VlaWithTables(VlaForActionPrediction):
    """Served by its name, in place of the class that the checkpoint names."""


OVERRIDES = {"architectures": [VlaWithTables.__name__]}
