"""OpenOneRec recommends videos: each is three codes, which are tokens in the prompt and in the answer.

Source: https://github.com/Kuaishou-OneRec/OpenOneRec at 1f4a99e, paper arXiv 2512.24762; Apache 2.0 by its README.

The model may reason first, and then writes a video.
"""

import numpy as np

from mmkit import (
    Modality,
    ModelSpec,
    Output,
    Scope,
    Tensor,
    any_id,
    batched,
    between,
    cfg,
    fields,
    literal,
    replace,
    tok,
)

LEVELS = ("<s_a_{}>", "<s_b_{}>", "<s_c_{}>")
"""The tokens of the first, the second and the third code."""


def find_first_ids(scope: Scope) -> np.ndarray:
    """Return the id of code 0 of each level, int64 (3,)."""
    return np.array([scope.tok[level, 0] for level in LEVELS])


def decode(ids: np.ndarray, scope: Scope) -> np.ndarray:
    """Ids to codes, int64 (3,)."""
    codes: np.ndarray = ids - find_first_ids(scope)
    return codes


def encode(codes: np.ndarray, scope: Scope) -> np.ndarray:
    """Codes to ids."""
    ids: np.ndarray = codes + find_first_ids(scope)
    return ids


CODES = [tok[level, fields.codes[number]] for number, level in enumerate(LEVELS)]
CHOICES = [any_id(tok[level, 0], tok[level, cfg.codebook_size - 1] + 1) for level in LEVELS]

ONEREC = ModelSpec(
    "onerec",
    Modality(
        "video",
        item=Tensor((len(LEVELS),), "int64", bound=between(0, cfg.codebook_size - 1)),
        fields={"codes": batched()},
        # no embed(): a video is ids of the vocabulary
        layout=literal(tok["<|sid_begin|>"], *CODES, tok["<|sid_end|>"]),
        update=replace(tok["<|video|>"]),
    ),
    outputs=[
        Output(
            "recommendation",
            CHOICES[0] + CHOICES[1] + CHOICES[2],
            decode,
            encode,
            after=tok["<|sid_begin|>"],
            until=tok["<|sid_end|>"],
            most=1,
        )
    ],
)
