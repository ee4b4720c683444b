"""LLaVA's picture, and as output the action of a robot in the arithmetic of OpenVLA.

The arithmetic is that of `predict_action` in openvla/openvla (prismatic/extern/hf/modeling_prismatic.py, commit
c8f03f4), and the config has the fields of a published one:

- the ids of actions are the last `n_action_bins` of the vocabulary without its `pad_to_multiple_of` rows of padding;
- `norm_stats` holds the statistics of each data set; the `unnorm_key` of the config names one, where there are several;
- where `mask` is False, a dimension has the value of its bin, from -1 to 1, as it is;
- a prompt ends with the token that Llama's tokenizer calls "▁", as the prompts of the training did.

The picture is LLaVA's: OpenVLA's has six channels, for two encoders, and its rows stand behind the first token.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from examples.llava_like.spec import LLAVA_LIKE
from mmkit import Output, Scope, any_id, cfg, ending_with, later, tok

EMPTY_TOKEN = "▁"


class Statistics(NamedTuple):
    """The actions of a data set, each array with one value per dimension.

    Attributes:
        low: their 1 % quantiles, float64, in the units of the robot.
        high: their 99 % quantiles.
        mask: whether a dimension is scaled to these.
    """

    low: np.ndarray
    high: np.ndarray
    mask: np.ndarray


def select_statistics(norm_stats: Mapping[str, Any], unnorm_key: str | None) -> Statistics:
    """Return the statistics of one data set, which has to be named where there are several.

    Raises:
        ValueError: names the data sets.
    """
    if unnorm_key is None and len(norm_stats) == 1:
        (unnorm_key,) = norm_stats
    if unnorm_key is None or unnorm_key not in norm_stats:
        names = ", ".join(norm_stats)
        raise ValueError(f"the config's unnorm_key is {unnorm_key!r}; norm_stats has the data sets {names}")
    statistics = norm_stats[unnorm_key]["action"]
    low = np.array(statistics["q01"], np.float64)
    high = np.array(statistics["q99"], np.float64)
    mask = np.array(statistics.get("mask", np.ones_like(low)), bool)
    return Statistics(low, high, mask)


def count_dimensions(norm_stats: Mapping[str, Any], unnorm_key: str | None) -> int:
    """Return the number of dimensions of an action."""
    return len(select_statistics(norm_stats, unnorm_key).low)


def decode_action(ids: np.ndarray, scope: Scope) -> np.ndarray:
    """Return the action of ids, int64 (dimensions,), as float64 (dimensions,) in the units of the robot."""
    statistics = _find_statistics(scope)
    edges = _compute_edges(scope)
    centres = (edges[:-1] + edges[1:]) / 2
    # n edges have n - 1 bins, and there are n ids: the last bin has two
    bins = np.minimum(_find_first_padding_id(scope) - 1 - ids, len(centres) - 1)
    normalized = centres[bins]
    scaled = statistics.low + (normalized + 1) / 2 * (statistics.high - statistics.low)
    return np.where(statistics.mask, scaled, normalized)


def encode_action(action: np.ndarray, scope: Scope) -> np.ndarray:
    """Return the ids of the bins that an action lies in, as the data of a training have them.

    Raises:
        ValueError: a dimension lies beyond its range.
    """
    statistics = _find_statistics(scope)
    low = np.where(statistics.mask, statistics.low, -1.0)
    high = np.where(statistics.mask, statistics.high, 1.0)
    normalized = (action - low) / (high - low) * 2 - 1
    if not (np.abs(normalized) <= 1).all():
        raise ValueError(f"{action.tolist()} lies beyond {low.tolist()} to {high.tolist()}")
    ids: np.ndarray = _find_first_padding_id(scope) - np.digitize(normalized, _compute_edges(scope))
    return ids


def _find_statistics(scope: Scope) -> Statistics:
    return select_statistics(scope.cfg.norm_stats, getattr(scope.cfg, "unnorm_key", None))


def _compute_edges(scope: Scope) -> np.ndarray:
    return np.linspace(-1.0, 1.0, scope.cfg.n_action_bins)


def _find_first_padding_id(scope: Scope) -> int:
    return int(scope.cfg.get_text_config().vocab_size - scope.cfg.pad_to_multiple_of)


FIRST_PADDING_ID = cfg.text_config.vocab_size - cfg.pad_to_multiple_of
DIMENSIONS = later(count_dimensions)(cfg.norm_stats, cfg.get("unnorm_key", None))

VLA = LLAVA_LIKE.model_copy(
    update={
        "name": "vla",
        "prompt": ending_with(tok[EMPTY_TOKEN]),
        "outputs": [
            Output(
                "action",
                any_id(FIRST_PADDING_ID - cfg.n_action_bins, FIRST_PADDING_ID) * DIMENSIONS,
                decode_action,
                encode_action,
            )
        ],
    }
)
