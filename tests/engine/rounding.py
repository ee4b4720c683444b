"""How far log probabilities of an engine and of transformers may differ, both in float32."""

import torch

ROUNDING = 0.02 if torch.cuda.is_available() else 1e-4
"""The largest difference of a log probability that rounding makes.

On a GPU vLLM takes attention in float32 by Triton, which multiplies in TF32: 10 bits of a fraction instead of 23.
"""
