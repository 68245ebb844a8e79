"""Defines what the config and the planner must know of a backend, without torch.

To add one: a module in ``hires.backends`` with its facts and its class, and a test.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from hires.core.registry import Named, Registry, imported


@dataclass(frozen=True)
class BackendFacts:
    """What holds for all messages of a backend."""

    summary: str
    """A sentence for those who choose one."""
    opened: Named
    """Returns its class, on a rank; or where that is, as ``module:name``."""
    has_streams: bool = False
    """Whether messages pass streams of a GPU in the order of posting, without tags."""
    compares_calls: bool = False
    """Whether its collectives report that ranks give other sizes, types or operations. Of others
    hires compares the first call of each kind before it begins."""
    one_machine: bool = False
    """Whether it needs all ranks on one machine."""
    shares_memory: bool = False
    """Whether its messages are in memory that ranks share: complete as soon as they are sent, with
    nothing that carries them beside the computation, and in the way of ``comm.shared_memory``."""

    @functools.cached_property
    def backend(self) -> Any:
        """Its class, a subclass of :class:`hires.comm.backends.backend.Backend`."""
        return self.opened() if callable(self.opened) else imported(self.opened)


BACKEND_FACTS: Registry[BackendFacts] = Registry("backend", "hires.backends")
"""``comm.backend`` -> its facts."""
