"""Declares the keys of how training moves parameters: ``optimizer``."""

from __future__ import annotations

from dataclasses import dataclass, field

from hires.core.config.value_checks import Checks, Section, choice, number, share
from hires.core.errors import ConfigError

OWN_KEYS = {
    "sgd": ("momentum", "nesterov"),
    "adam": ("betas", "eps"),
    "adamw": ("betas", "eps"),
}
"""Value of ``optimizer`` -> the keys that it takes beside ``lr`` and ``weight_decay``."""


def _check_betas(key: str, value: list[float]) -> None:
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        raise ConfigError(
            f"{key}={value} must be two numbers from 0 to below 1: for the mean of gradients and "
            f"for that of their squares, as [0.9,0.999]"
        )


CHOICES = {
    "sgd": "Stochastic gradient descent with momentum, as torch.optim.SGD",
}
"""Choices of ``optimizer`` without further keys, and what each is."""


@dataclass
class OptimizerConfig(Section, key="optimizer", own_keys=OWN_KEYS, choices=CHOICES):
    """``optimizer=NAME``: how training moves parameters."""

    name: str = choice("sgd", OWN_KEYS)
    """As in torch: ``sgd`` (stochastic gradient descent), ``adam`` or ``adamw`` (Adam with
    decoupled weight decay)."""
    lr: float = number(0.005)
    """Learning rate, the largest one of ``lr_schedule``."""
    scale_lr: bool = False
    """Whether ``lr`` is that of one replica, and is multiplied by ``parallel.replicas`` (linear
    scaling, for a ``batch`` that grows with the replicas)."""
    weight_decay: float = number(1e-4)
    """Share of each parameter that is added to its gradient (``sgd``, ``adam``), or that times the
    learning rate is taken off the parameter itself (``adamw``)."""
    clip_norm: float | None = number(None, above=True)
    """Largest norm of the gradients of all parameters together: larger ones are scaled down to it,
    as by ``torch.nn.utils.clip_grad_norm_``; unset: none are."""
    ema: float | None = share(None)
    """Share of a running mean of the weights that each step keeps, as 0.999; it begins with the
    first weights, and is in checkpoints beside these: ``weights=RUN/ema`` takes it. Unset: none."""
    momentum: float = number(0.9)
    """Of ``sgd``: share of the last step's direction that is kept."""
    nesterov: bool = False
    """Of ``sgd``: whether the momentum is Nesterov's."""
    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.999], metadata={"check": _check_betas}
    )
    """Of ``adam`` and ``adamw``: shares of the running means of gradients and of their squares
    that a step keeps."""
    eps: float = number(1e-8)
    """Of ``adam`` and ``adamw``: added to the root of the second mean, against a division by 0."""
    shard: bool = False
    """Whether the ranks that hold the same parameters (tiles, replicas, directions) divide their
    update: each keeps the optimiser's state of its part, moves it, and sends it to the others."""
    exchange: str = choice("auto", ("auto", "broadcast", "scatter"))
    """How they do that: every rank gets the sums of all gradients and broadcasts what it has moved
    (``broadcast``), or it gets the sums of its part alone, and one gather brings all parameters
    together (``scatter``, two thirds of the bytes); ``auto``: what the tuning table has measured as
    faster, or what sends less."""

    def _check_more(self, check: Checks) -> None:
        if self.name == "sgd" and self.nesterov and not self.momentum:
            check.problems.append(
                "optimizer.nesterov=True needs a momentum; use optimizer.momentum=0.9, or leave it "
                "out"
            )

    @property
    def num_states(self) -> int:
        """Numbers that it keeps for each parameter."""
        own = 2
        if self.name == "sgd":
            own = 1 if self.momentum else 0
        return own + (self.ema is not None)
