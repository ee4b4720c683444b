"""Muon in float32: torch.optim.Muon computes in bfloat16, which CPUs without such instructions emulate."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# coefficients of the quintic Newton-Schulz iteration, https://kellerjordan.github.io/posts/muon/
A = 3.4445
B = -4.7750
C = 2.0315

STEPS = 5
"""Of the iteration."""


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal: for the matrices of hidden layers.

    Args:
        matrices: the parameters, all of them two-dimensional.
        lr: learning rate, as for AdamW: updates have the root mean square 0.2 (https://arxiv.org/abs/2502.16982).
        momentum: of the gradients; Nesterov's.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change the parameters."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for weight in group["params"]:
                by_shape.setdefault(weight.shape, []).append(weight)
            for shape, weights in by_shape.items():
                directions = torch.stack([self._find_direction(weight, group["momentum"]) for weight in weights])
                size = group["lr"] * 0.2 * max(shape) ** 0.5
                for weight, update in zip(weights, orthogonalise(directions), strict=True):
                    weight.sub_(update, alpha=size)

    def _find_direction(self, weight: nn.Parameter, momentum: float) -> Tensor:
        """Return the gradient after Nesterov's momentum."""
        state = self.state[weight]
        assert weight.grad is not None
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        average: Tensor = state["momentum"].lerp_(weight.grad, 1 - momentum)
        return weight.grad.lerp(average, momentum)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices (count, rows, cols) with about equal singular values, near 1."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if is_tall else x
