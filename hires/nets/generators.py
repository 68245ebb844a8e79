"""Makes torch's generators, and keeps their states."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_ONE_AT_A_TIME = threading.RLock()
"""Threads of a process, as those of tiles in a test, share the generators that are seeded."""
HOST_STATE = "torch"
"""Name of the state of the CPU's generator, which every rank has."""


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states that a rank of a device draws from, as tensors of the host, by name."""
    states, own = {HOST_STATE: torch.get_rng_state()}, _own_generator(device)
    if own is not None:
        states[_name(device)] = own.get_rng_state(device)
    return states


def set_generator_states(device: torch.device, states: dict[str, Tensor]) -> None:
    """Sets those states of a device that are there; what else there is stays as it is."""
    if HOST_STATE in states:
        torch.set_rng_state(states[HOST_STATE])
    own = _own_generator(device)
    if own is not None and _name(device) in states:
        own.set_rng_state(states[_name(device)], device)


def new_generator(device: torch.device | None) -> torch.Generator:
    """Returns a generator for operators on a device."""
    has_own = device is not None and _own_generator(device) is not None
    return torch.Generator(device) if has_own else torch.Generator()


@contextlib.contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seeds what operators on a device draw from without a generator, and restores it behind.

    Other threads wait until it is restored.
    """
    with _ONE_AT_A_TIME:
        before, own = generator_states(device), _own_generator(device)
        try:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU, too
            if own is not None:
                own.manual_seed(seed)
            yield
        finally:
            set_generator_states(device, before)


def _own_generator(device: torch.device) -> Any:
    # The CPU's module has none, nor has that of a device that draws from the CPU's generator.
    module = torch.get_device_module(device)
    return module if hasattr(module, "get_rng_state") else None


def _name(device: torch.device) -> str:
    return f"{HOST_STATE}.{device.type}"
