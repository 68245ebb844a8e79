"""Defines what the config and the planner must know of a backend, without torch.

To add one: a module in ``hires.backends`` with its facts and its class, and a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hires.core.registry import Registry


@dataclass(frozen=True)
class BackendFacts:
    """What holds for all messages of a backend."""

    summary: str
    """A sentence for those who choose one."""
    has_streams: bool = False
    """Whether messages pass streams of a GPU in the order of posting, without tags."""
    one_machine: bool = False
    """Whether it needs all ranks on one machine."""
    opened: Callable[[], Any] | None = None
    """Returns its class, a :class:`hires.comm.backends.backend.Backend`, on a rank; None: that is
    registered in ``hires.comm.backends``."""


BACKEND_FACTS: Registry[BackendFacts] = Registry("backend", "hires.backends")
"""``comm.backend`` -> its facts."""
