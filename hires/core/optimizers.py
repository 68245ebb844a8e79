"""Lists the optimisers: what the config and the plan must know of each, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class TorchOptimizer(NamedTuple):
    """An optimiser of ``torch.optim`` that moves every number of a parameter by itself."""

    torch_class: str
    lr: float
    """What ``optimizer=NAME`` sets, like the ``weight_decay``."""
    weight_decay: float
    num_states: int
    """Numbers that it keeps for each of a parameter."""
    summary: str
    takes: str
    """Names of what ``optimizer.args`` may have, beside ``maximize``."""
    args: Mapping[str, Any] = MappingProxyType({})
    """Its arguments where ``optimizer.args`` names no others."""


OPTIMIZERS = {
    "sgd": TorchOptimizer(
        "SGD",
        0.005,
        1e-4,
        0,
        "Stochastic gradient descent with momentum",
        "momentum dampening nesterov",
        {"momentum": 0.9},
    ),
    "adam": TorchOptimizer(
        "Adam", 1e-3, 0.0, 2, "Adam", "betas eps amsgrad decoupled_weight_decay"
    ),
    "adamw": TorchOptimizer(
        "AdamW", 1e-3, 0.01, 2, "Adam with decoupled weight decay", "betas eps amsgrad"
    ),
    "adadelta": TorchOptimizer("Adadelta", 1.0, 0.0, 2, "Adadelta", "rho eps"),
    "adagrad": TorchOptimizer(
        "Adagrad", 0.01, 0.0, 1, "Adagrad", "lr_decay initial_accumulator_value eps"
    ),
    "adamax": TorchOptimizer("Adamax", 2e-3, 0.0, 2, "Adam with the norm of infinity", "betas eps"),
    "asgd": TorchOptimizer(
        "ASGD", 0.01, 0.0, 1, "Averaged stochastic gradient descent", "lambd alpha t0"
    ),
    "nadam": TorchOptimizer(
        "NAdam",
        2e-3,
        0.0,
        2,
        "Adam with Nesterov momentum",
        "betas eps momentum_decay decoupled_weight_decay",
    ),
    "radam": TorchOptimizer(
        "RAdam", 1e-3, 0.0, 2, "Rectified Adam", "betas eps decoupled_weight_decay"
    ),
    "rmsprop": TorchOptimizer("RMSprop", 0.01, 0.0, 1, "RMSprop", "alpha eps momentum centered"),
    "rprop": TorchOptimizer("Rprop", 0.01, 0.0, 2, "Resilient backpropagation", "etas step_sizes"),
}
REFUSED = {
    "lbfgs": "computes the loss several times in a step",
    "muon": "needs each matrix as a whole, and ranks move rows of it",
    "adafactor": "keeps sums over the rows and columns of each matrix, and ranks move rows of it",
    "sparseadam": "takes sparse gradients, and all gradients here are dense",
}
"""Optimisers of torch that no layout computes, with the cause."""
SET_BY_HIRES = ("lr", "weight_decay", "fused", "foreach", "capturable", "differentiable")
"""Arguments that are no part of ``optimizer.args``."""
MORE_STATES = ("momentum", "centered", "amsgrad")
"""Arguments with which an optimiser keeps one more number each."""
