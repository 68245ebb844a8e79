"""Makes and seeds torch's generators."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_ONE_AT_A_TIME = threading.RLock()
"""Threads of a process, as those of tiles in a test, share the generators that are seeded."""


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
        own = _own_generator(device)
        before = torch.get_rng_state()
        of_device = None if own is None else own.get_rng_state(device)
        try:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU, too
            if own is not None:
                own.manual_seed(seed)
            yield
        finally:
            torch.set_rng_state(before)
            if own is not None:
                own.set_rng_state(of_device, device)


def _own_generator(device: torch.device) -> Any:
    # The CPU's module has none, nor has that of a device that draws from the CPU's generator.
    module = torch.get_device_module(device)
    return module if hasattr(module, "get_rng_state") else None
