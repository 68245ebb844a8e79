"""Trains a network in one process with torch alone: what every layout must reproduce."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hires.core.config.precision_config import PrecisionConfig
from hires.core.config.run_config import RunConfig
from hires.engine.build import whole_model
from hires.engine.loader import whole_microbatches
from hires.engine.optimizer import optimizer_of
from hires.parallel.loss import plain_loss


@dataclass
class PlainTraining:
    """What each step had, and what the training has left."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    means: dict[str, Tensor] = field(default_factory=dict)
    """Running means of the parameters, by name."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The network's parameters by name."""
        return {name: tensor.detach() for name, tensor in self.model.named_parameters()}


def torch_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Returns torch's own optimiser with the settings of a config."""
    kind, settings = optimizer_of(config)
    return kind(model.parameters(), **settings)


def torch_rates(config: RunConfig) -> list[float]:
    """Returns the rates of a run's steps by torch's schedules, the warm-up followed by another."""
    keys, lr, of = config.lr_schedule, config.optimizer.lr, torch.optim.lr_scheduler
    lr *= config.parallel.replicas if config.optimizer.scale_lr else 1
    total = (keys.steps or config.steps) - keys.warmup
    kinds: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
        "warmup": lambda own: of.LinearLR(own, keys.warmup_begin, 1.0, keys.warmup),
        "constant": lambda own: of.ConstantLR(own, 1.0),
        "step": lambda own: of.StepLR(own, keys.step_size, keys.gamma),
        "cosine": lambda own: of.CosineAnnealingLR(own, total, keys.final),
        "one_cycle": lambda own: of.OneCycleLR(
            own, lr, total, pct_start=keys.rise, cycle_momentum=False,
            div_factor=keys.first_divisor, final_div_factor=keys.last_divisor,
        ),
    }  # fmt: skip
    rates: list[float] = []
    for name, count in (("warmup", keys.warmup), (keys.name, config.steps - keys.warmup)):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)
        schedule = kinds[name](optimizer) if count else None
        for step in range(count):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if step + 1 < count:
                schedule.step()
    return rates


def plain_training(config: RunConfig, skipped: Collection[int] = ()) -> PlainTraining:
    """Trains in float64, microbatch by microbatch; leaves out the updates of ``skipped`` steps."""
    config = replace(config, precision=PrecisionConfig("fp64"))
    made = PlainTraining(whole_model(config))
    optimizer, share = torch_optimizer(config, made.model), config.optimizer.ema
    made.means = {name: tensor.clone() for name, tensor in made.parameters.items()}
    rates = torch_rates(config)
    for step in range(config.steps):
        replicas = range(config.parallel.replicas)
        microbatches = [m for r in replicas for m in whole_microbatches(config, r, step)]
        optimizer.zero_grad()
        made.losses.append(0.0)
        for images, target in microbatches:
            loss = plain_loss(config.objective, made.model(images), target) / len(microbatches)
            loss.backward()
            made.losses[-1] += float(loss.detach())
        optimizer.param_groups[0]["lr"] = rates[step]
        if config.optimizer.clip_norm is not None:
            parameters = made.model.parameters()
            norm = nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm)
            made.norms.append(float(norm))
        if step not in skipped:
            optimizer.step()
            for name, tensor in made.parameters.items() if share is not None else ():
                made.means[name] = share * made.means[name] + (1 - share) * tensor
    return made
