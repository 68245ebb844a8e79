"""Optimisers by one fused kernel, without copies: another one is a class here.

``torch.optim.SGD(fused=True)`` moves all parameters in one pass, but copies every channels-last
weight, its gradient and its momentum into another order first and back afterwards: more work than
the step itself. Here the same kernels see all tensors as rows of numbers in the order in which they
lie, so nothing is copied.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hires.core.config.fields import keys_of
from hires.core.config.run_config import RunConfig
from hires.core.learning_rate import learning_rate
from hires.core.registry import Registry
from hires.parallel.gradients import flat, rows_of, shaped


class Optimizer:
    """Moves parameters, contiguous or channels-last, along their gradients.

    ``settings`` are keys of ``optimizer``, named as in its reference.
    """

    reference: ClassVar[type[torch.optim.Optimizer]]  # torch's own, for ``hires verify``
    kernel: ClassVar[str | None] = None  # its ATen kernel, if torch has no shape function of it
    kept: dict[str, Callable[[Tensor], Tensor]]
    """What it keeps for each parameter, by names that begin a file of a checkpoint: from the
    parameter's numbers to the first value."""

    def __init__(self, parameters: Iterable[nn.Parameter], **settings: Any) -> None:
        self.parameters = list(parameters)
        self.settings = settings
        self.updates = 0
        """Steps that it has taken; a checkpoint keeps it."""
        self.ema: float | None = None
        """Share of the running mean of each parameter that a step keeps; None: there is none."""
        self.rate: Callable[[int], float] | None = None
        """From a step of the run to its learning rate; None: always that of the settings."""
        self.rows: dict[int, tuple[int, int]] | None = None
        """By a parameter's id the rows that it moves of it, first and end; None: all of all."""
        self._state: dict[int, dict[str, Tensor]] = {}  # by id: a hash of a tensor costs a call

    def update(
        self, parameters: list[Tensor], gradients: list[Tensor], kept: dict[str, list[Tensor]]
    ) -> None:
        """Moves the numbers of parameters of one type, in place, and what is kept for them."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def reserve(self) -> None:
        """Makes what a step keeps, without one: a skipped step needs as much memory as others."""
        for parameter in self.parameters:
            if parameter.grad is not None and self.moves(parameter):
                self._numbers(parameter)

    @torch.no_grad()
    def step(self, number: int = 0) -> None:
        """Moves the parameters that have a gradient, each type's together, in a step of the run."""
        self.updates += 1
        if self.rate is not None:
            self.settings["lr"] = self.rate(number)
        by_type: dict[torch.dtype, list[tuple[nn.Parameter, Tensor]]] = {}
        for parameter in self.parameters:
            if parameter.grad is not None and self.moves(parameter):
                by_type.setdefault(parameter.dtype, []).append((parameter, parameter.grad))
        for moved in by_type.values():
            states = [self._numbers(parameter) for parameter, _ in moved]
            parameters = [flat(self.own(parameter)) for parameter, _ in moved]
            kept = {name: [state[name] for state in states] for name in self.kept}
            gradients = [flat(self.own(gradient, parameter)) for parameter, gradient in moved]
            self.update(parameters, gradients, kept)
            if self.ema is not None:
                torch._foreach_lerp_(kept[EMA], parameters, 1 - self.ema)

    def keep_ema(self, share: float) -> None:
        """Keeps a running mean of the parameters from now on; it begins with what they are."""
        self.ema, self.kept = share, {**self.kept, EMA: torch.clone}

    @torch.no_grad()
    def begin_ema(self) -> None:
        """Sets the running means that are there to what the parameters are now."""
        for parameter in self.parameters:
            state = self._state.get(id(parameter), {})
            if EMA in state:
                state[EMA].copy_(flat(self.own(parameter)))

    @contextlib.contextmanager
    def ema_in_place(self) -> Iterator[None]:
        """Gives the parameters the numbers of their running means while it lasts."""
        self._swap_ema()
        try:
            yield
        finally:
            self._swap_ema()

    @torch.no_grad()
    def _swap_ema(self) -> None:
        for parameter in self.parameters:
            mean = self._state.get(id(parameter), {}).get(EMA)
            if mean is not None:
                own = flat(self.own(parameter))
                before = own.clone()
                own.copy_(mean)
                mean.copy_(before)

    def state(self) -> list[Tensor]:
        """Returns what is kept for the parameters that were moved so far."""
        return [tensor for state in self._state.values() for tensor in state.values()]

    def moves(self, parameter: Tensor) -> bool:
        """Whether it moves a parameter, or rows of it."""
        return self.rows is None or id(parameter) in self.rows

    def first_row(self, parameter: Tensor) -> int:
        """Returns the first row that it moves of a parameter."""
        return 0 if self.rows is None else self.rows[id(parameter)][0]

    def own(self, tensor: Tensor, parameter: Tensor | None = None) -> Tensor:
        """Returns the rows that it moves of a parameter, or of its gradient, as a view."""
        if self.rows is None:
            return tensor.detach()
        return rows_of(tensor, *self.rows[id(tensor if parameter is None else parameter)])

    def kept_of(self, parameter: Tensor, make: bool = False) -> dict[str, Tensor]:
        """Returns what is kept for the rows that it moves by name, in their shape, as views.

        Nothing is kept for those that were never moved, unless ``make`` begins it.
        """
        if not self.moves(parameter):
            return {}
        state = self._numbers(parameter) if make else self._state.get(id(parameter), {})
        own = self.own(parameter)
        return {n: shaped(t, own) if t.numel() == own.numel() else t for n, t in state.items()}

    def _numbers(self, parameter: Tensor) -> dict[str, Tensor]:
        if id(parameter) not in self._state:
            numbers = flat(self.own(parameter))
            self._state[id(parameter)] = {name: make(numbers) for name, make in self.kept.items()}
        return self._state[id(parameter)]


EMA = "ema"
"""What is kept of each parameter as its running mean; a checkpoint has files of that name."""

OPTIMIZERS: Registry[type[Optimizer]] = Registry("optimiser")


@OPTIMIZERS.register("sgd")
class FusedSGD(Optimizer):
    """Stochastic gradient descent with momentum and weight decay, as in ``torch.optim.SGD``."""

    reference = torch.optim.SGD
    kernel = "_fused_sgd_"

    def __init__(self, parameters: Iterable[nn.Parameter], **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.kept = {"momentum": torch.zeros_like} if settings["momentum"] else {}

    def update(
        self, parameters: list[Tensor], gradients: list[Tensor], kept: dict[str, list[Tensor]]
    ) -> None:
        """Moves numbers; the momentum is zero at first, to which the gradient is added."""
        rest: Any = {"nesterov": False, **self.settings, "dampening": 0.0, "maximize": False}
        momenta = kept.get("momentum", [])
        torch._fused_sgd_(parameters, gradients, momenta, **rest, is_first_step=False)


@OPTIMIZERS.register("adam")
class FusedAdam(Optimizer):
    """Adam, as in ``torch.optim.Adam``: each parameter has a mean of gradients and of squares."""

    reference: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    compute: ClassVar[Callable[..., None]] = torch._fused_adam_

    def __init__(self, parameters: Iterable[nn.Parameter], **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.kept = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like}

    def update(
        self, parameters: list[Tensor], gradients: list[Tensor], kept: dict[str, list[Tensor]]
    ) -> None:
        """Moves numbers; as many steps count for each as the optimiser has taken."""
        rest = {key: one for key, one in self.settings.items() if key != "betas"}
        rest["beta1"], rest["beta2"] = self.settings["betas"]
        count = torch.tensor(float(self.updates), device=parameters[0].device)
        counts = [count] * len(parameters)
        means = kept["exp_avg"], kept["exp_avg_sq"]
        rest |= {"amsgrad": False, "maximize": False}
        type(self).compute(parameters, gradients, *means, [], counts, **rest)


@OPTIMIZERS.register("adamw")
class FusedAdamW(FusedAdam):
    """Adam with decoupled weight decay, as in ``torch.optim.AdamW``."""

    reference = torch.optim.AdamW
    compute = torch._fused_adamw_


def optimizer_of(config: RunConfig) -> tuple[type[Optimizer], dict[str, Any]]:
    """Returns the optimiser of a run and its settings in the first step."""
    keys, name = config.optimizer, config.optimizer.name
    names = ("weight_decay", *keys_of(type(keys), name))
    settings = {key: getattr(keys, key) for key in names}
    return OPTIMIZERS[name], {"lr": learning_rate(config, 0), **settings}


def make_optimizer(config: RunConfig, parameters: list[nn.Parameter]) -> Optimizer | None:
    """Returns the optimiser of a run, or None if there is nothing to train."""
    trainable = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    kind, settings = optimizer_of(config)
    if config.task.name != "train" or not trainable:
        return None
    made = kind(trainable, **settings)
    made.rate = functools.partial(learning_rate, config)
    if config.optimizer.ema is not None:
        made.keep_ema(config.optimizer.ema)
    return made
