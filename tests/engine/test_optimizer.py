"""Our gradient descent against ``torch.optim.SGD``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hires.engine.optimizer import FusedSGD

SHAPES = [(8, 4, 3, 3), (8, 4, 1, 1), (5, 7), (9,)]
UNREACHED = 1
"""Index of the parameter to which no gradient comes in the first step."""


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in SHAPES:
        numbers: Tensor = torch.randn(shape, generator=generator).to(dtype)
        if numbers.dim() == 4:
            numbers = numbers.contiguous(memory_format=torch.channels_last)
        made.append(nn.Parameter(numbers))
    return made


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_descent_goes_where_torch_goes(dtype: torch.dtype, momentum: float):
    ours, theirs = parameters(dtype), parameters(dtype)
    descent = FusedSGD(ours, lr=0.1, momentum=momentum, weight_decay=0.01)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            gradient = torch.randn(own.shape, generator=generator).to(dtype)
            known = step > 0 or index != UNREACHED
            own.grad = torch.empty_like(own).copy_(gradient) if known else None
            other.grad = gradient.clone() if known else None
        descent.step()
        reference.step()
        descent.zero_grad()
        assert all(p.grad is None for p in ours)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            own, other, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0
        )


def test_momentum_goes_over_to_another_descent_in_the_shape_of_its_parameter():
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    first = FusedSGD(ours, lr=0.1, momentum=0.9, weight_decay=0.01)
    second = FusedSGD(theirs, lr=0.1, momentum=0.9, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(p.shape, generator=generator).to(p) for p in ours]
    move(first, gradients)
    for own, other in zip(ours, theirs, strict=True):
        direction = first.direction(own)
        assert direction is not None
        assert direction.shape == own.shape
        second.set_direction(other, direction.contiguous())
        other.data.copy_(own.data)
    for descent in (first, second):
        move(descent, gradients)
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)


def move(descent: FusedSGD, gradients: list[torch.Tensor]) -> None:
    """Takes one step along given gradients."""
    for parameter, gradient in zip(descent.parameters, gradients, strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    descent.step()


def test_momentum_of_what_was_never_moved_or_is_not_kept_is_none():
    ours = parameters(torch.float32)
    plain = FusedSGD(ours, lr=0.1, momentum=0.0, weight_decay=0.0)
    plain.set_direction(ours[0], torch.ones_like(ours[0]))
    assert plain.direction(ours[0]) is None
    assert FusedSGD(ours, lr=0.1, momentum=0.9, weight_decay=0.0).direction(ours[0]) is None


def test_momentum_is_kept_for_what_was_moved():
    ours = parameters(torch.float32)
    descent = FusedSGD(ours, lr=0.1, momentum=0.9, weight_decay=0.0)
    assert descent.state() == []
    ours[0].grad = torch.ones_like(ours[0])
    descent.step()
    assert [direction.numel() for direction in descent.state()] == [ours[0].numel()]
