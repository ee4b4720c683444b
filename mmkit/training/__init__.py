"""Specs as processors of transformers, for training.

This package imports no vLLM.

- `processor`: the base of the generated processors;
- `padding`, `batch`: samples of a batch as tensors;
- `collator`: a batch with the labels of its answers;
- `chat`, `template`: conversations as vLLM's chat reads them, and their templates;
- `mixin`: the model side;
- `saving`: a processor in a checkpoint folder;
- `document_processor`: the processor of a folder whose spec is a document.
"""

from .collator import Collator as Collator
from .document_processor import DocumentProcessor as DocumentProcessor
from .mixin import MultiModalMixin as MultiModalMixin
from .processor import Processor as Processor
