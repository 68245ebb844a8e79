"""Starts the ranks of a benchmark by the command of an MPI, by srun or by torchrun.

    this process ── mpirun ──▶ rank 0 ... n - 1     python -m hires.bench.started_ranks JSON
         ▲                        │
         └── lines of mpirun's standard output ◀── values of rank 0, and the error of any rank

A value or an error is a line of JSON behind a mark; all else that ranks and library print goes to
standard error or is shown if a rank fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hires.bench.ranks import traceback_of
from hires.core import log as logs
from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.mpi_dialects import DIALECTS
from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, LateError, RunError
from hires.core.python_command import module_command
from hires.core.ranks import meeting, mpi_library, mpi_starter, ports
from hires.core.ranks.world import World

TORCHRUN = "torchrun"
"""The starter that needs no MPI."""
LONGEST_WORD = 65536
"""A longer job is a file: Linux takes words of the command line up to twice as long."""
FILE = "@"
"""Prefix of the argument that names this file."""
MARK = b"\x1ehires "
"""Prefix of the lines of this module."""
_VALUE, _ERROR = "value", "error"
_SHOWN = 12
"""Last lines of other output that the error of a failed command has."""


def stream_started_ranks(
    starter_name: str,
    job: str,
    num_ranks: int,
    timeout_s: float,
    *args: Any,
    hosts: tuple[str, ...] = (),
) -> Iterator[Any]:
    """Yields what ``job(world, *args)`` yields on rank 0 of started ranks.

    ``job`` is ``module:function``, its arguments and values are plain; it joins the world itself.
    ``starter_name``: a key of ``DIALECTS``; ``hosts``: the machines among which the ranks are
    spread, none for this one.
    RunError: a rank fails; LateError: time is over. No rank is left behind.
    """
    config = RunConfig(launcher=LauncherConfig(TORCHRUN))
    if starter_name != TORCHRUN:
        config.launcher = LauncherConfig("mpirun", mpi=starter_name, hosts=[*hosts])
    starter = mpi_starter.starter(config, mpi_starter.hosts_of(config, num_ranks))
    if shutil.which(starter.words[0]) is None:
        raise RunError(
            f"there is no {starter.words[0]} here, which --start {starter_name} needs; install it, "
            f"load its module, or use --start {TORCHRUN}"
        )
    words = starter.words[: starter.words.index(sys.executable)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ |= mpi_library.variables(starter_name, words[0], environ)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(ports.reserve(0))
        address = hosts[0] if hosts else "127.0.0.1"
        task = {"starter": starter_name, "job": job, "args": args}
        text = json.dumps({**task, "address": address, "port": port})
        if len(text) > LONGEST_WORD:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
            file.write(text)
            file.flush()
            text = f"{FILE}{file.name}"
        command = [*words, *module_command("hires.bench.started_ranks", text)]
        process = subprocess.Popen(
            command,
            env=starter.environment(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        stack.enter_context(process.stdout)
        stack.callback(_end, process)
        yield from _values(process, starter_name, hosts, timeout_s)


def _values(
    process: subprocess.Popen[bytes], starter_name: str, hosts: tuple[str, ...], timeout_s: float
) -> Iterator[Any]:
    others: list[str] = []
    for line in _lines(process, time.monotonic() + timeout_s, timeout_s):
        if not line.startswith(MARK):
            others.append(line.decode(errors="replace").rstrip())
            continue
        message = json.loads(line[len(MARK) :])
        if _ERROR in message:
            raise RunError(f"rank {message['rank']} failed: {message[_ERROR]}")
        yield message[_VALUE]
    if process.wait(5.0):
        last = " | ".join(filter(None, others[-_SHOWN:])) or "no message on its standard output"
        where, remedy = "", "" if starter_name == TORCHRUN else f"; use --start {TORCHRUN}"
        if hosts:  # what torchrun would start on this one alone
            where = f" on {', '.join(hosts)}"
            remedy = "; each of --hosts must be reached without a password, as by `ssh HOST true`"
        raise RunError(
            f"--start {starter_name}: its command{where} ended with code {process.returncode}: "
            f"{last}{remedy}"
        )


def _lines(process: subprocess.Popen[bytes], deadline: float, timeout_s: float) -> Iterator[bytes]:
    assert process.stdout is not None
    stream, held = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise LateError(f"the ranks were not done after {timeout_s:g} s; use --timeout")
            data = os.read(stream, 1 << 16)
            held += data
            *whole, held = held.split(b"\n")
            yield from whole
            if not data:
                yield from [held] if held else []
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the command, and with it its ranks: first as it would itself, then at once."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3.0)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # ranks of a command that has ended


def main() -> None:
    """The life of one rank."""
    text = sys.argv[1]
    if text.startswith(FILE):
        text = Path(text.removeprefix(FILE)).read_text(encoding="utf-8")
    task = json.loads(text)
    world = _place(task)
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not ours
    logs.setup(world.rank)
    torch.set_num_threads(1)
    module, _, name = task["job"].partition(":")
    try:
        for value in getattr(import_module(module), name)(world, *task["args"]):
            if world.rank == 0:
                _tell(output, {_VALUE: value})
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, HiresError) and isinstance(error, Exception):
            text = traceback_of(error)
        _tell(output, {_ERROR: text, "rank": world.rank})
        os._exit(1)
    os._exit(0)


def _place(task: dict[str, Any]) -> World:
    # This rank among all, with an environment in which our rendezvous is the only one.
    numbers = mpi_starter.numbers(task["starter"], os.environ)
    if task["starter"] == TORCHRUN:  # its own rendezvous would take the place of ours
        outer = tuple(DIALECTS[TORCHRUN].outer.split())
        for name in [name for name in os.environ if name.startswith(outer)]:
            del os.environ[name]
    secret = meeting.secret_of_environment()
    world = World(*numbers, task["address"], task["port"], 0, secret)
    if world.local_size == world.size:
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return world


def _tell(output: int, message: dict[str, Any]) -> None:
    data = MARK + json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(output, data) :]


if __name__ == "__main__":
    main()
