"""Specs as processors of transformers, for training. This package imports no vLLM.

- `processor`: the base of the generated processors;
- `batch`: samples of a batch as tensors, with the labels of their answers;
- `mixin`: the model side;
- `saving`: a processor in a checkpoint folder.
"""

from .batch import Collator as Collator
from .mixin import MultiModalMixin as MultiModalMixin
from .processor import Processor as Processor
