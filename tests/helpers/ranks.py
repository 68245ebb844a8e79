"""Real ranks for tests: processes that talk over gloo, with a hard end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hires.core.errors import HiresError
from tests.helpers.patience import PATIENCE_S
from tests.helpers.pool import FRESH, POOL


def run_ranks(
    job: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = PATIENCE_S
) -> list[Any]:
    """Returns what ``job(world, *args)`` returns on each of ``num_ranks`` processes.

    They come from the pool if the module of the job has ``POOLED = True``, as one whose jobs leave
    their process as it was; else they are new and end with the job.

    Raises:
        AssertionError: a rank failed or the time ran out; nothing is left behind.
    """
    pool = POOL if getattr(sys.modules[job.__module__], "POOLED", False) else FRESH
    return pool.run(job, num_ranks, *args, timeout_s=timeout_s)


def error_of(call: Callable[[], Any]) -> str:
    """Returns the error of hires of a call; empty: it had none."""
    try:
        call()
    except HiresError as error:
        return str(error)
    return ""
