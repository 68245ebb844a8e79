"""Refuses networks that compute what no graph holds, for a reason that is seen in one forward pass.

A graph holds operators, whose gradient is torch's own, and the numbers of Python as they were when
it was traced. ``model.trusted=true`` takes a network as it is; ``hires verify`` compares a step.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm

from hires.core.errors import ConfigError

_TRUST = "or set model.trusted=true in a run and compare a step with `hires verify`"
_GRADIENT = (
    "the network has {}, which may change the gradient, and a graph holds operators with their own "
    "gradients only; write it with operators in the forward pass, as x + (f(x) - x).detach() for "
    f"f with the gradient of x, {_TRUST}"
)
_DRAWS = (
    "the network draws random numbers of Python or NumPy in its forward pass, which a graph holds "
    "as they were when it was traced; draw them with torch and compute with them, as "
    f"x * torch.rand(len(x), 1, 1, 1).ge(0.1) does, {_TRUST}"
)
_STATE = (
    "the network changes its attribute {} in its forward pass, which a graph holds as it was when "
    f"it was traced; keep it in a buffer, {_TRUST}"
)
_HOOKED = (
    "{} has a hook (register_{}) that would never be called: ranks compute operators, not layers; "
    "remove it, or read the layer where the plain module is called. Hooks on parameters are "
    "called, and those on what hires.shard returns"
)


def refuse_hooks(model: nn.Module) -> None:
    """Raises ConfigError if a module, one of its layers, or all modules have hooks on calls.

    Those of torch.nn.utils, as of weight_norm, compute weights and are part of the plan.
    """
    for kind in ("forward_pre_hook", "forward_hook", "backward_pre_hook", "backward_hook"):
        if getattr(modules, f"_global_{kind}s"):
            raise ConfigError(_HOOKED.format("every module", f"module_{kind}"))
        for path, module in model.named_modules():
            hooks = getattr(module, f"_{kind}s").values()
            if not all(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks):
                raise ConfigError(_HOOKED.format(path or "the module", kind))


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raises ConfigError if a parameter or a module has a hook on gradients."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"the network has a gradient hook on its parameter {name}, which would see "
                f"the gradient of one rank alone; write it with operators, {_TRUST}"
            )
    for path, module in (("every module", modules), *model.named_modules()):
        prefix = "_global_backward" if module is modules else "_backward"
        if any(getattr(module, f"{prefix}{kind}hooks") for kind in ("_", "_pre_")):
            raise ConfigError(_GRADIENT.format(f"a backward hook on {path or 'its whole module'}"))


def refuse_means_of_all(model: nn.Module, training: bool | None) -> None:
    """Raises ConfigError if a batch norm that trains weighs all batches so far alike."""
    for path, module in model.named_modules():
        trains = module.training if training is None else training
        if not trains or not isinstance(module, _BatchNorm):
            continue
        if module.momentum is None and module.track_running_stats:
            raise ConfigError(
                f"the layer {path} of the network is a {type(module).__name__} with momentum=None, "
                f"whose running mean depends on how many batches there were; give it a number, as "
                f"momentum=0.1"
            )


@contextlib.contextmanager
def traceable(model: nn.Module, training: bool) -> Iterator[None]:
    """Raises ConfigError if a forward pass of ``model`` in the block does what no graph holds."""
    numbers = _numbers(model)
    states: list[tuple[Any, bytes]] = []

    def begin(*call: Any) -> None:  # torch draws, too, when it does not call the network
        states[:] = _generator_states()

    def end(*call: Any) -> None:
        if any(pickle.dumps(one) != before for one, before in states):
            raise ConfigError(_DRAWS)

    def refuse_hook(tensor: Tensor, hook: Any) -> None:
        raise ConfigError(_GRADIENT.format("a hook on a tensor (register_hook)"))

    refusal = mock.patch.object(Tensor, "register_hook", refuse_hook)
    hooks = refusal if training else contextlib.nullcontext()
    handles = model.register_forward_pre_hook(begin), model.register_forward_hook(end)
    try:
        with hooks, _own_functions() as functions:
            yield
    finally:
        for handle in handles:
            handle.remove()
    if training and functions:
        raise ConfigError(_GRADIENT.format(f"autograd.Function {', '.join(functions)}"))
    changed = [name for name, value in _numbers(model).items() if numbers.get(name, value) != value]
    if changed:
        raise ConfigError(_STATE.format(changed[0]))


@contextlib.contextmanager
def _own_functions() -> Iterator[dict[str, None]]:
    """Yields the names of the autograd functions, but torch's own, that a block applies."""
    names: dict[str, None] = {}
    apply = torch.autograd.Function.__dict__["apply"]

    def noted(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.__module__.partition(".")[0] != "torch":
            names[function.__name__] = None
        return apply.__get__(None, function)(*args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(noted)):
        yield names


def _generator_states() -> list[tuple[Any, bytes]]:
    """Returns all generators of random numbers of Python and NumPy, each with its state."""
    kinds = (random.Random, np.random.Generator, np.random.RandomState)
    shared = [random.random.__self__, np.random.rand.__self__]  # type: ignore[attr-defined]
    # What torch itself draws from while it traces.
    own = [getattr(tempfile._get_candidate_names(), "rng", None)]  # type: ignore[attr-defined]
    own += vars(sys.modules.get("sympy.core.random", gc)).values()
    states = []
    for generator in [*gc.get_objects(), *shared]:
        if issubclass(type(generator), kinds) and not any(generator is one for one in own):
            with contextlib.suppress(Exception):  # of the system, which have no state
                states.append((generator, pickle.dumps(generator)))
    return states


def _numbers(model: nn.Module) -> dict[str, float]:
    """Returns the numbers that modules hold as attributes, by name."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in {**vars(type(module)), **vars(module)}.items()
        if type(value) in (int, float, bool)
    }
