"""Specs as processors of transformers, for training: no vLLM is imported here.

- `processor`: the base of the generated processors;
- `batch`: samples of a batch, as tensors;
- `chat`: messages with items in them;
- `saving`: a processor in a checkpoint folder.
"""

from __future__ import annotations

from .processor import Processor as Processor
