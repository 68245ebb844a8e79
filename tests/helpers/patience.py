"""How long tests wait for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 200.0
"""Far longer than anything takes: a loaded machine may be ten times slower."""

T = TypeVar("T")


def until(
    answer: Callable[[], T],
    what: str = "an answer",
    pause_s: float = 0.02,
    patience_s: float = PATIENCE_S,
) -> T:
    """Returns the answer as soon as it is true."""
    deadline = time.monotonic() + patience_s
    while not (found := answer()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(pause_s)
    return found
