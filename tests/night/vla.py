"""The vision-language-action model with one more output, whose positions differ."""

from examples.vla.model import VlaForActionPrediction
from examples.vla.spec import VLA
from mmkit import Output, any_id, cfg, literal, tok

SIZE = cfg.text_config.vocab_size - cfg.pad_to_multiple_of
# two ranges and a literal in every row, of ids that the model would hardly choose there
TABLE = ((any_id(40, 44) + any_id(SIZE - 3, SIZE)) * 3 + tok["a"]) * 4 + literal(tok["</s>"])
TABLES = Output("table", TABLE, lambda ids, scope: ids.reshape(4, 3, 2))
WITH_TABLES = VLA.model_copy(update={"outputs": [*VLA.outputs, TABLES]})


@WITH_TABLES.register
class VlaWithTables(VlaForActionPrediction):
    """Served by its name, in place of the class that the checkpoint names."""


OVERRIDES = {"architectures": [VlaWithTables.__name__]}
