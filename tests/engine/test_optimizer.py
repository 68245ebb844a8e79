"""Our optimisers against those of ``torch.optim``."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from hires.core.config.optimizer_config import OWN_KEYS
from hires.core.config.run_config import from_dict
from hires.engine.optimizer import OPTIMIZERS, FusedSGD, Optimizer, make_optimizer

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


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"momentum": 0.9, "nesterov": False}),
    "no momentum": ("sgd", {"momentum": 0.0, "nesterov": False}),
    "nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}),
    "adam": ("adam", {"betas": [0.8, 0.95], "eps": 1e-6}),
    "adamw": ("adamw", {"betas": [0.9, 0.999], "eps": 1e-8}),
}


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_optimiser_goes_where_torch_goes(dtype: torch.dtype, case: str):
    name, settings = SETTINGS[case]
    ours, theirs = parameters(dtype), parameters(dtype)
    kind, settings = OPTIMIZERS[name], {"lr": 0.1, "weight_decay": 0.01, **settings}
    optimizer = kind(ours, **settings)
    reference = kind.reference(theirs, **settings)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            gradient = torch.randn(own.shape, generator=generator).to(dtype)
            # Steps of Adam count for all parameters together: the plan reaches each in every step.
            known = step > 0 or index != UNREACHED or name != "sgd"
            own.grad = torch.empty_like(own).copy_(gradient) if known else None
            other.grad = gradient.clone() if known else None
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in ours)
    # fp32: a few rounded sums of numbers that are about 1; zeros lie far below them.
    bound = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-13, "atol": 0}
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, **bound)


@pytest.mark.parametrize("name", OWN_KEYS)
def test_config_has_the_states_and_keys_of_each_optimiser(name: str):
    config = from_dict({"optimizer": {"name": name}})
    optimizer = make_optimizer(config, parameters(torch.float32))
    assert optimizer is not None
    assert len(optimizer.kept) == config.optimizer.num_states
    assert list(OPTIMIZERS) == list(OWN_KEYS)


def test_momentum_goes_over_to_another_descent_in_the_shape_of_its_parameter():
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    first = FusedSGD(ours, lr=0.1, momentum=0.9, weight_decay=0.01)
    second = FusedSGD(theirs, lr=0.1, momentum=0.9, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(p.shape, generator=generator).to(p) for p in ours]
    move(first, gradients)
    for own, other in zip(ours, theirs, strict=True):
        momentum = first.kept_of(own)["momentum"]
        assert momentum.shape == own.shape
        second.kept_of(other, make=True)["momentum"].copy_(momentum.contiguous())
        other.data.copy_(own.data)
    for descent in (first, second):
        move(descent, gradients)
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)


def move(descent: Optimizer, gradients: list[torch.Tensor]) -> None:
    """Takes one step along given gradients."""
    for parameter, gradient in zip(descent.parameters, gradients, strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    descent.step()


def test_momentum_of_what_was_never_moved_or_is_not_kept_is_none():
    ours = parameters(torch.float32)
    plain = FusedSGD(ours, lr=0.1, momentum=0.0, weight_decay=0.0)
    move(plain, [torch.ones_like(parameter) for parameter in ours])
    assert plain.kept_of(ours[0]) == {}
    assert FusedSGD(ours, lr=0.1, momentum=0.9, weight_decay=0.0).kept_of(ours[0]) == {}


def test_momentum_is_kept_for_what_was_moved():
    ours = parameters(torch.float32)
    descent = FusedSGD(ours, lr=0.1, momentum=0.9, weight_decay=0.0)
    assert descent.state() == []
    ours[0].grad = torch.ones_like(ours[0])
    descent.step()
    assert [direction.numel() for direction in descent.state()] == [ours[0].numel()]


class Counting(Optimizer):
    """Moves by the sign of the gradient, and counts its steps for each parameter."""

    kept: ClassVar = {"moves": lambda numbers: torch.zeros(())}

    def update(self, parameters, gradients, kept) -> None:
        for parameter, gradient, moves in zip(parameters, gradients, kept["moves"], strict=True):
            parameter -= self.settings["lr"] * gradient.sign()
            moves += 1


def test_optimiser_is_one_class_that_is_registered(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS._items, "sgd", Counting)
    ours = parameters(torch.float64)
    before = [parameter.detach().clone() for parameter in ours]
    optimizer = make_optimizer(
        from_dict({"optimizer": {"lr": 0.25}, "model": {"classes": 2}}), ours
    )
    assert optimizer is not None
    for _ in range(2):
        move(optimizer, [torch.ones_like(parameter) for parameter in ours])
    assert all(torch.equal(a - 0.5, b) for a, b in zip(before, ours, strict=True))
    assert [float(count) for count in optimizer.state()] == [2.0] * len(ours)
    assert optimizer.kept_of(ours[0])["moves"].shape == ()


def test_reserved_state_changes_no_step():
    torch.manual_seed(0)
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizers = [FusedSGD([p], lr=0.1, momentum=0.9, weight_decay=0.01) for p in (first, second)]
    first.grad, second.grad = torch.full((3,), 0.5), torch.full((3,), 0.5)
    optimizers[0].reserve()
    assert [len(optimizer.state()) for optimizer in optimizers] == [1, 0]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.step()
    assert torch.equal(first, second)
