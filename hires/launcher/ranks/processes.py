"""Starts, watches and stops one process per rank, and leaves none behind.

Every rank leads a session and process group of its own: a signal reaches whatever it started too,
and Ctrl-C in the terminal reaches only the supervisor, which decides. On Linux the kernel kills a
rank whose supervisor dies, even by ``kill -9``; it watches the *thread* that started the rank,
so the thread that calls :func:`start` must live as long as the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hires.core.errors import RunError
from hires.core.store.files import cannot_write
from hires.launcher.ranks import spawn


@dataclass
class RankProcess:
    """A rank's process and what is known about its end."""

    rank: int
    log: Path
    process: spawn.Child
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    ended_s: float = 0.0
    """When its end was seen, in seconds since the epoch."""
    relayed: bool = False
    """Whether this process is not the rank itself but passes its signals and its end on."""


def start(
    rank: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    relayed: bool = False,
) -> RankProcess:
    """Starts a rank's process, its output going to ``log``.

    Args:
        rank: the rank.
        command: its words.
        environ: its environment.
        log: a file, which is added to.
        relayed: whether the command starts the rank and passes its signals and its end on.

    Raises:
        RunError: the log cannot be written or the process cannot be started.
    """
    try:
        output = log.open("ab")
    except OSError as error:
        raise cannot_write(log, error) from error
    with output:
        try:
            streams = spawn.Streams(None, output.fileno(), output.fileno())
            process = spawn.start(command, environ, streams, hold=not relayed)
        except (OSError, subprocess.SubprocessError) as error:
            raise RunError(f"cannot start rank {rank} with {command[0]}: {error}") from error
    return RankProcess(rank, log, process, relayed=relayed)


def poll(ranks: Iterable[RankProcess]) -> list[RankProcess]:
    """Returns the ranks that ended since the last call, their exit codes filled in."""
    ended = [rank for rank in ranks if rank.code is None and _has_ended(rank.process.pid)]
    seen_s = time.time()
    for rank in ended:
        # It is not reaped yet, so its number still means this group.
        _signal_group(rank, signal.SIGKILL)
        rank.code = _code(rank)
        rank.ended_s = seen_s
    return ended


def stop(ranks: Sequence[RankProcess], grace_s: float, hurry: Callable[[], bool]) -> None:
    """Ends all ranks: SIGTERM, and SIGKILL for those still there after ``grace_s``.

    Args:
        ranks: the ranks; those that ended already are left alone.
        grace_s: how long they may take to end by themselves.
        hurry: SIGKILL follows at once when it returns True; called repeatedly.
    """
    for rank in ranks:
        if rank.code is None:
            _signal_group(rank, signal.SIGTERM)
            _signal_group(rank, signal.SIGCONT)  # a stopped process sees no SIGTERM
    deadline = time.monotonic() + grace_s
    while not all_ended(ranks) and time.monotonic() < deadline and not hurry():
        time.sleep(0.02)
    kill(ranks)


def ask(ranks: Iterable[RankProcess]) -> None:
    """Asks the ranks to save their state and end. What they started themselves is not asked."""
    for rank in ranks:
        if rank.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGUSR2)


def pass_on(rank: RankProcess, number: signal.Signals) -> None:
    """Sends one signal to a rank that this process started, as the functions above would."""
    if rank.code is not None:
        return
    if number in (signal.SIGTERM, signal.SIGKILL):
        _signal_group(rank, number)
        _signal_group(rank, signal.SIGCONT)  # a stopped process sees no SIGTERM
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process.pid, number)


def kill(ranks: Sequence[RankProcess]) -> None:
    """Ends all ranks at once and waits for them."""
    for rank in ranks:
        if rank.code is None:
            _signal_group(rank, signal.SIGKILL)
    for rank in ranks:
        if rank.code is None:
            rank.code = _code(rank)
            rank.ended_s = time.time()


def all_ended(ranks: Iterable[RankProcess]) -> bool:
    """Returns whether every rank has ended."""
    ranks = list(ranks)
    poll(ranks)
    return all(rank.code is not None for rank in ranks)


def last_lines(log: Path, count: int = 20) -> list[str]:
    """Returns the last lines of a log, without reading all of it."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 200 * count))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip().splitlines()[-count:]


def _has_ended(pid: int) -> bool:
    """Returns whether the process has ended, without reaping it."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_PID, pid, options) is not None
    except ChildProcessError:  # it was reaped elsewhere
        return True


def _code(rank: RankProcess) -> int:
    """Returns the exit code of a rank that has ended or is about to, negative for a signal."""
    code = rank.process.wait()
    return 128 - code if rank.relayed and code > 128 else code


def _signal_group(rank: RankProcess, number: signal.Signals) -> None:
    """Sends a signal to a rank and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not rank.relayed:
            os.killpg(rank.process.pid, number)
        elif rank.code is None:
            # Alone: srun has a child in its group that ends the rank if srun is killed.
            os.kill(rank.process.pid, number)
