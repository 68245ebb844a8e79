"""Real ranks for tests: processes that talk over gloo, with a hard end.

A fork server that has imported torch once makes a rank start in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from hires.core.ranks import ports
from hires.core.ranks.world import World
from tests.helpers.patience import PATIENCE_S

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed", "hires.worker", "pytest", "tests.helpers.rank_server"]
)


def run_ranks(
    job: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = PATIENCE_S
) -> list:
    """Returns what ``job(world, *args)`` returns on each of ``num_ranks`` processes.

    Args:
        job: a function of an importable module; it begins and ends its own communication.
        num_ranks: processes.
        args: pickled for every rank.
        timeout_s: after this time all ranks are killed.

    Raises:
        AssertionError: a rank failed or the time ran out; nothing is left behind.
    """
    pipes, ranks = [], []
    with ports.reserve(0) as port:
        for rank in range(num_ranks):
            ours, theirs = _context.Pipe(duplex=False)
            world = World(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, 0)
            process = _context.Process(target=_rank, args=(theirs, job, world, args), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        try:
            return _answers(pipes, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _answers(pipes: list[Connection], deadline: float) -> list:
    """Returns the answers of all ranks; the first failure ends the wait for the others."""
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready = multiprocessing.connection.wait([*waiting], max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(waiting.values())} gave no answer in time"
        for pipe in ready:
            good, answer = _receive(pipe)
            assert good, f"rank {waiting[pipe]} failed:\n{answer}"
            answers[waiting[pipe]] = answer
    return [answers[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection) -> tuple[bool, Any]:
    """Returns (succeeded, answer) of a rank; a rank that died without a word has failed."""
    try:
        return pipe.recv()
    except EOFError:
        return False, "it died without an answer"


def _rank(pipe: Connection, job: Callable[..., Any], world: World, args: tuple[Any, ...]) -> None:
    """One rank's life."""
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        answer = (True, job(world, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        pipe.send(answer)
    pipe.close()
    os._exit(0)
