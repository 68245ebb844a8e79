"""Moves parameters by an optimiser of ``torch.optim``, without copies.

An optimiser of torch that works number by number gives the same on a tensor and on the row of its
numbers. So it gets flat views of the rows that a rank moves, in the order in which they lie: a
fused kernel would copy each channels-last weight, its gradient and its state into another order and
back, more work than the step itself.

    parameter (K, C, h, w), channels-last  --rows of this rank, flat-->  view (n,)  <--torch.optim
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import learning_rate
from hires.core.errors import ConfigError
from hires.core.optimizers import OPTIMIZERS
from hires.parallel.gradients import flat, rows_of, shaped

Settings = dict[str, Any]
Rows = Mapping[int, tuple[int, int]]
"""By a parameter's id the rows that an optimiser moves of it, first and end."""
EMA = "ema"
"""What is kept of each parameter as its running mean; a checkpoint has files of that name."""
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Those with one kernel for all parameters on every kind of device."""

# torch.optim imports its compiler where a parameter is added, and in the wrapper of a step: 3 s and
# 80 MiB in every rank.
_add = inspect.unwrap(torch.optim.Optimizer.add_param_group)
setattr(_add, "__dynamo_disable", _add)


class Optimizer:
    """Moves parameters, contiguous or channels-last, along their gradients.

    Args:
        parameters: to move.
        kind: an optimiser of torch that moves each number by itself.
        settings: its arguments.
        rows: that are moved of each parameter; None: all of all.
        ema: share of the running mean of each parameter that a step keeps; None: there is none.
        rate: from a step of the run to its learning rate; None: always that of the settings.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        kind: type[torch.optim.Optimizer],
        settings: Settings,
        rows: Rows | None = None,
        ema: float | None = None,
        rate: Callable[[int], float] | None = None,
    ) -> None:
        self.parameters, self.rows, self.ema = list(parameters), rows, ema
        self.settings, self._rate = settings, rate
        moved = [p for p in self.parameters if rows is None or id(p) in rows]
        self._views = {id(p): nn.Parameter(flat(self.own(p))) for p in moved}
        self._means: dict[int, Tensor] = {}
        self.torch: torch.optim.Optimizer = kind([{"params": [*self._views.values()]}], **settings)
        self._step = functools.partial(inspect.unwrap(kind.step), self.torch)
        state = _state_of(kind, settings, self.parameters[0])
        self._scalars = {name: t for name, t in state.items() if not t.dim()}
        self.kept = [name for name, t in state.items() if t.dim()] + [EMA] * (ema is not None)
        """Names of what is kept for each parameter; they begin the files of a checkpoint."""

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, number: int = 0) -> None:
        """Moves the parameters that have a gradient, in a step of the run."""
        moved = []
        for parameter in self.parameters:
            view = self._views.get(id(parameter))
            if view is not None and parameter.grad is not None:
                view.grad = flat(self.own(parameter.grad, parameter))
                moved.append(view)
                if self.ema is not None and id(parameter) not in self._means:
                    self._means[id(parameter)] = view.detach().clone()
        if self._rate is not None:
            self.torch.param_groups[0]["lr"] = self._rate(number)
        self._step()
        for view in moved:
            view.grad = None
        if self.ema is not None:
            views = [self._views[key].data for key in self._means]
            torch._foreach_lerp_([*self._means.values()], views, 1 - self.ema)

    @torch.no_grad()
    def begin_ema(self) -> None:
        """Sets the running means that are there to what the parameters are now."""
        for key, mean in self._means.items():
            mean.copy_(self._views[key])

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
        for key, mean in self._means.items():
            before = self._views[key].detach().clone()
            self._views[key].copy_(mean)
            mean.copy_(before)

    def state(self) -> list[Tensor]:
        """Returns what is kept for the parameters, without single numbers."""
        tensors = [t for state in self.torch.state.values() for t in state.values()]
        return [t for t in tensors if t is not None and t.dim()] + [*self._means.values()]

    def numbers(self) -> dict[str, float]:
        """Returns the single numbers that are kept, alike for all parameters; none at first."""
        state = next((one for one in self.torch.state.values() if one), None)
        return {} if state is None else {name: float(state[name]) for name in self._scalars}

    def restore_numbers(self, numbers: Mapping[str, float]) -> bool:
        """Sets the single numbers, and begins what is kept; False: some of them are missing."""
        if not self._scalars.keys() <= numbers.keys():
            return False
        for key, view in self._views.items():
            self._state(key)
            for name in self._scalars:
                self.torch.state[view][name].fill_(numbers[name])
        return True

    def moves(self, parameter: Tensor) -> bool:
        """Whether it moves a parameter, or rows of it."""
        return id(parameter) in self._views

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
        key, own = id(parameter), self.own(parameter)
        state = self._state(key) if make else self.torch.state.get(self._views[key], {})
        tensors = {name: state[name] for name in self.kept if name in state}
        if key in self._means:
            tensors[EMA] = self._means[key]
        return {name: shaped(tensor, own) for name, tensor in tensors.items()}

    @torch.no_grad()
    def _state(self, key: int) -> dict[str, Any]:
        # What torch keeps for a parameter; it begins with zeros.
        view = self._views[key]
        state: dict[str, Any] = self.torch.state[view]
        if not state:
            state |= {name: torch.zeros_like(view) for name in self.kept if name != EMA}
            state |= {name: number.clone() for name, number in self._scalars.items()}
        if self.ema is not None:
            self._means.setdefault(key, view.detach().clone())
        return state


def _state_of(
    kind: type[torch.optim.Optimizer], settings: Settings, like: Tensor
) -> dict[str, Tensor]:
    # What an optimiser keeps for a parameter of one number, after a step; of the others it keeps
    # as many tensors, and the same single numbers.
    with unset_fake_temporarily(), torch.no_grad():
        tiny = nn.Parameter(torch.ones(1, dtype=like.dtype, device=like.device))
        tiny.grad = torch.ones_like(tiny)
        optimizer = kind([tiny], **settings)
        inspect.unwrap(kind.step)(optimizer)
        return {name: t for name, t in optimizer.state[tiny].items() if t is not None}


def optimizer_of(config: RunConfig) -> tuple[type[torch.optim.Optimizer], Settings]:
    """Returns the optimiser of torch of a run, and its arguments in the first step."""
    keys = config.optimizer
    kind = getattr(torch.optim, OPTIMIZERS[keys.name].torch_class)
    settings = {"lr": learning_rate(config, 0), **keys.all_args}
    if keys.name != "rprop":
        settings["weight_decay"] = keys.weight_decay
    try:
        kind([torch.zeros(1)], **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer={keys.name} optimizer.args={keys.args}: {error}") from error
    return kind, settings


def make_optimizer(
    config: RunConfig, parameters: list[nn.Parameter], rows: Rows | None = None
) -> Optimizer | None:
    """Returns the optimiser of a run, or None if there is nothing to train.

    ConfigError: torch refuses ``optimizer.args``.
    """
    trainable = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    if config.task.name != "train" or not trainable:
        return None
    kind, settings = optimizer_of(config)
    # Without a fused kernel parameter by parameter: the memory of one more of them is enough.
    settings |= {"fused": True} if kind in FUSED else {"foreach": False}
    rate = functools.partial(learning_rate, config)
    return Optimizer(trainable, kind, settings, rows, config.optimizer.ema, rate)
