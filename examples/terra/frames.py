"""Image tokens as pictures, and back: what Terra's output `frame` is, as the checkpoint's `image_tokenizer` says."""

from importlib import import_module
from typing import Any

import numpy as np

from mmkit import Scope


def decode_frame(ids: np.ndarray, scope: Scope) -> np.ndarray:
    """Image tokens, int64 (num_image_patches,), as a picture, uint8 (height, width, 3).

    They stay as they are where the checkpoint names no tokenizer.
    """
    return ids if scope.cfg.image_tokenizer is None else _world(scope).pictures(ids[None])[0]


def encode_frame(array: np.ndarray, scope: Scope) -> np.ndarray:
    """Return the image tokens of a picture."""
    return array if scope.cfg.image_tokenizer is None else _world(scope).tokens(array[None])[0]


def _world(scope: Scope) -> Any:
    # no import statement: transformers copies what a saved processor imports, and finds no subfolders
    return import_module(".worlds", __package__).load_world(scope.cfg)
