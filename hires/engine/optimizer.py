"""Stochastic gradient descent by one fused kernel, without copies.

``torch.optim.SGD(fused=True)`` does it in one pass, but copies every channels-last weight, its
gradient and its momentum into another order first and back afterwards: more work than the step
itself. Here the same kernel sees all tensors as rows of numbers in the order in which they lie, so
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hires.parallel.gradients import flat, shaped


class FusedSGD:
    """Stochastic gradient descent with momentum and weight decay, as in ``torch.optim.SGD``.

    Args:
        parameters: what is trained; contiguous, or channels-last with four dims.
        lr: learning rate.
        momentum: part of the last step's direction that stays; 0 keeps none.
        weight_decay: part of the parameters that is added to their gradients.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        self.parameters = list(parameters)
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self._directions: dict[int, Tensor] = {}  # by id: a hash of a tensor costs a call

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Moves the parameters that have a gradient, each type's together."""
        by_type: dict[torch.dtype, list[tuple[nn.Parameter, Tensor]]] = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                by_type.setdefault(parameter.dtype, []).append((parameter, parameter.grad))
        for moved in by_type.values():
            torch._fused_sgd_(
                [flat(parameter.detach()) for parameter, _ in moved],
                [flat(gradient) for _, gradient in moved],
                [self._direction(p) for p, _ in moved] if self.momentum else [],
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )

    def state(self) -> list[Tensor]:
        """Returns the momentum of the parameters that were moved so far."""
        return list(self._directions.values())

    def direction(self, parameter: Tensor) -> Tensor | None:
        """Returns a parameter's momentum in its shape, as a view; None if it was never moved."""
        numbers = self._directions.get(id(parameter))
        return None if numbers is None else shaped(numbers, parameter)

    @torch.no_grad()
    def set_direction(self, parameter: Tensor, direction: Tensor) -> None:
        """Takes over a parameter's momentum, given in its shape; without momentum it is dropped."""
        if self.momentum:
            shaped(self._direction(parameter), parameter).copy_(direction)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Returns a parameter's momentum; zeros at first, to which the gradient is added."""
        if id(parameter) not in self._directions:
            self._directions[id(parameter)] = torch.zeros_like(flat(parameter.detach()))
        return self._directions[id(parameter)]
