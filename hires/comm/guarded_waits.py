"""Runs what may wait for another rank; an error names the operation and the other side."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from hires.comm.comm_world import CommWorld, activity
from hires.comm.sequence_check import ENDED_S, PATIENCE_S
from hires.core.errors import CommError, EndedError, PeerError

_WRONG_ARGUMENT = re.compile("scalar type|ReduceOp|not supported|unsupported|not implemented")
_PLACE = re.compile(r"\[\S+:\d+\] ")
"""A line of a library's source, as gloo begins its texts with."""

FAILURES = (CommError, OSError, RuntimeError, ValueError)
"""What backends raise."""


def waiting(
    call: Callable[[], Any],
    what: str,
    world: CommWorld,
    ranks: Sequence[int],
    number: int = -1,
    operation: str = "",
) -> Any:
    """Returns what :func:`guard` does; meanwhile ``activity`` shows that the rank waits in it.

    ``ranks`` are all that come to it, with ``operation`` in a step.
    """
    outer = activity.begin(what, -1, -1, tuple(ranks), number, operation)
    try:
        return guard(call, what, world, number=number)
    finally:
        activity.end(outer)


def guard(
    call: Callable[[], Any], what: str, world: CommWorld, backend: str = "", number: int = -1
) -> Any:
    """Returns the result of a call; a failure of the backend becomes a ``CommError``."""
    try:
        return call()
    except FAILURES as error:
        raise failure(what, error, world, backend, number) from error


def failure(
    what: str, error: Exception, world: CommWorld, backend: str = "", number: int = -1
) -> CommError:
    """Returns the error of an operation that a backend failed with another one.

    ``number``: of the call that waited; what the other ranks call instead is added, unless the
    error is one of this rank alone.
    """
    what = f"{what} over {backend}" if backend else what
    reason = str(error)
    if not isinstance(error, CommError):
        reason = _in_short(reason) or type(error).__name__
    why, check = "", world.check
    if check is not None:
        check.has_failed = True
    if number >= 0 and check is not None and is_of_peer(error):
        # One that has ended gives no answer, for which the others would be waited for in vain.
        ended = error.ranks if isinstance(error, EndedError) else ()
        patience_s = ENDED_S if isinstance(error, EndedError) else PATIENCE_S
        why = check.reason(number, patience_s, ended)
    return CommError(f"{what} failed: {reason}" + (f"; {why}" if why else ""))


def _in_short(text: str) -> str:
    # The first line of a library's text without what only its own developers need: of gloo the
    # line of its source and the advice, of MPICH the heading of its stack.
    line = text.strip().partition("\n")[0]
    if place := _PLACE.match(line):
        line = line[place.end() :].partition(". ")[0]
    return line.removesuffix(", error stack:")[:300]


def is_of_peer(error: Exception) -> bool:
    """Whether another rank may be the cause: it is late, has ended, or calls something else."""
    if isinstance(error, PeerError | OSError):
        return True
    if isinstance(error, CommError | ValueError | NotImplementedError):
        return False
    # Of libraries: RuntimeErrors, whatever the cause.
    return _WRONG_ARGUMENT.search(str(error)) is None
