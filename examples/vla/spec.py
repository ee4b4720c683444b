"""LLaVA's picture, and as output an action: one token per dimension, each one of 256 bins, as in OpenVLA."""

import numpy as np

from examples.llava_like.spec import LLAVA_LIKE
from mmkit import Output, Scope, any_id, cfg, later

BINS = 256
EDGES = np.linspace(-1.0, 1.0, BINS)
CENTRES = (EDGES[:-1] + EDGES[1:]) / 2


def decode_action(ids: np.ndarray, scope: Scope) -> np.ndarray:
    """Ids, int64 (dimensions,), as an action in the units of the robot, float64 (dimensions,)."""
    low, high = _statistics(scope)
    # the last id of the vocabulary is the first bin; 256 edges have 255 bins, and the last one has two ids
    bins = np.minimum(scope.cfg.text_config.vocab_size - 1 - ids, BINS - 2)
    action: np.ndarray = low + (CENTRES[bins] + 1) / 2 * (high - low)
    return action


def encode_action(action: np.ndarray, scope: Scope) -> np.ndarray:
    """The ids of the bins that an action lies in; what is beyond them is refused."""
    low, high = _statistics(scope)
    scaled = (action - low) / (high - low) * 2 - 1
    if not (np.abs(scaled) <= 1).all():
        raise ValueError(f"{action.tolist()} lies beyond {low.tolist()} to {high.tolist()}")
    bins = np.minimum(np.digitize(scaled, EDGES) - 1, BINS - 2)
    ids: np.ndarray = scope.cfg.text_config.vocab_size - 1 - bins
    return ids


def _statistics(scope: Scope) -> tuple[np.ndarray, np.ndarray]:
    """The 1 % and 99 % quantiles of each dimension of the actions that the model was trained on."""
    low, high = (np.array(scope.cfg.norm_stats[name], np.float64) for name in ("q01", "q99"))
    return low, high


VLA = LLAVA_LIKE.model_copy(
    update={
        "name": "vla",
        "outputs": [
            Output(
                "action",
                # the last ids of the vocabulary
                any_id(cfg.text_config.vocab_size - BINS, cfg.text_config.vocab_size)
                * later(len)(cfg.norm_stats["q01"]),
                decode_action,
                encode_action,
            )
        ],
    }
)
