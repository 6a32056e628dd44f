"""Muon (Jordan et al., 2024) in float32, over stacks of matrices of one shape.

``torch.optim.Muon`` computes in bfloat16, matrix by matrix; on a CPU without bfloat16 units that takes longer than
the forward and backward passes of a small model. The update is the same: Nesterov momentum, made nearly orthogonal
by five Newton-Schulz iterations.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalized(matrices: Tensor) -> Tensor:
    """``[stack, short, long]`` (short <= long) -> matrices with the same singular vectors and values near 1.

    ``X <- a X + (b X X' + c (X X')^2) X``, from X of Frobenius norm 1.
    """
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """For matrices only. Wide and tall ones of one size share a stack.

    Args:
        weight_decay: decoupled, times the learning rate.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update. A tall matrix moves ``sqrt(rows / columns)`` as far, as in ``torch.optim.Muon``."""
        for group in self.param_groups:
            stacks: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    stacks[tuple(sorted(matrix.shape))].append(matrix)
            for matrices in stacks.values():
                directions = [_wide(self._momentum(matrix, group["momentum"])) for matrix in matrices]
                for matrix, update in zip(matrices, orthogonalized(torch.stack(directions)), strict=True):
                    rows, columns = matrix.shape
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    step = group["lr"] * max(1.0, rows / columns) ** 0.5
                    matrix.add_(update.mT if rows > columns else update, alpha=-step)

    def _momentum(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's look-ahead of the running mean of gradients."""
        assert matrix.grad is not None
        gradient = matrix.grad.float()
        state = self.state[matrix]
        if not state:
            state["mean"] = torch.zeros_like(gradient)
        state["mean"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["mean"], momentum)


def _wide(matrix: Tensor) -> Tensor:
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
