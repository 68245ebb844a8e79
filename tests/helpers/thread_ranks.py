"""Ranks as threads of this process, for what they share as memory alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.helpers.patience import PATIENCE_S


def run_threads(
    job: Callable[[int], Any], num_ranks: int, meeting: threading.Barrier | None = None
) -> list[Any]:
    """Returns what ``job(rank)`` returns on each rank; raises what the first that failed raised.

    That breaks the barrier at which the others meet, if they have one.
    """
    answers: list[Any] = [None] * num_ranks
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            answers[rank] = job(rank)
        except BaseException as error:
            errors[rank] = error
            if meeting is not None:
                meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for error in sorted(errors.values(), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    assert not any(thread.is_alive() for thread in threads), "ranks hang"
    return answers
