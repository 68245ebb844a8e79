"""Starts the ranks of a benchmark by torchrun, by the command of an MPI or by srun.

    this process ── command ──▶ rank 0 ... n - 1     python -m hires.bench.start_ranks TASK
         ▲                          │
         └── lines of its standard output ◀── values of rank 0, and the error of any rank

A value or an error is a line of JSON behind a prefix; all else that ranks and libraries print goes
to standard error, or is shown if the command fails.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hires import comm
from hires.core import streams
from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, LateError, RunError
from hires.core.programs import module_command
from hires.core.ranks import meeting, mpi_library, mpi_starter
from hires.core.ranks.world import MEETING, STARTER, World, from_environment
from hires.engine.device import open_device
from hires.engine.memory_meter import keep_memory
from hires.nets.custom import error_line
from hires.plan.hardware import CPU, GLOO

TORCHRUN = "torchrun"
LINE_PREFIX = b"\x1ehires "
END_S = 10.0  # how long the command may take to end after its ranks
MOST_LETTERS = 65536  # of a task on the command line; Linux takes words of up to twice as many
_SHOWN = 12  # last lines of other output that the error of a failed command has
log = logging.getLogger(__name__)


def run_ranks(job: str, num_ranks: int, timeout_s: float, *args: Any) -> Any:
    """Returns the last value of :func:`stream_ranks`; RunError: there was none."""
    values = [*stream_ranks(job, num_ranks, timeout_s, *args)]
    if not values:
        raise RunError(f"the ranks of {job} ended without a result")
    return values[-1]


def stream_ranks(
    job: str,
    num_ranks: int,
    timeout_s: float,
    *args: Any,
    start: str = TORCHRUN,
    hosts: Sequence[str] = (),
) -> Iterator[Any]:
    """Yields what the generator ``job(world, *args)`` yields on rank 0; no rank is left behind.

    ``job`` is ``module:function``; its values are plain. The ranks are started by
    ``start``, a key of ``DIALECTS``, and spread over the hosts; none: this machine. RunError: a
    rank failed, or the command is missing or failed. LateError: the time for all of it was over.
    """
    config = RunConfig(launcher=LauncherConfig(TORCHRUN))
    if start != TORCHRUN:
        config.launcher = LauncherConfig("mpirun", mpi=start, hosts=[*hosts])
    starter = mpi_starter.starter(config, mpi_starter.hosts_of(config, num_ranks))
    program, remedy = starter.words[0], "" if start == TORCHRUN else f"; use --start {TORCHRUN}"
    if shutil.which(program) is None:
        raise RunError(
            f"there is no {program} here, which --start {start} needs; install it or load its "
            f"module{remedy}"
        )
    environ = {**os.environ, "OMP_NUM_THREADS": "1", STARTER: start, "HIRES_ATTEMPT": "0"}
    environ |= mpi_library.variables(start, program, environ)
    others: list[str] = []
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(meeting.reserve_port(0))
        environ[MEETING] = f"{hosts[0] if hosts else '127.0.0.1'}:{port}"
        text = base64.b64encode(pickle.dumps((job, args))).decode()
        if len(text) > MOST_LETTERS:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w"))
            file.write(text)
            file.flush()
            text = f"@{file.name}"
        process = subprocess.Popen(
            starter.command(environ, module_command(__name__, text)),
            env=starter.environment(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        stack.callback(_end, process)
        late = threading.Event()
        timer = threading.Timer(timeout_s, _end, (process, late))
        timer.start()
        stack.callback(timer.cancel)
        for line in stack.enter_context(process.stdout):
            if line.startswith(LINE_PREFIX):
                message = json.loads(line[len(LINE_PREFIX) :])
                if "error" in message:
                    raise RunError(f"rank {message['rank']} failed: {message['error']}")
                yield message["value"]
            else:
                others.append(line.decode(errors="replace").rstrip())
        if late.is_set():
            raise LateError(f"the ranks were not done after {timeout_s:g} s; use --timeout")
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:  # all ranks have closed their output: nothing is missing
            log.warning("--start %s: its command did not end after its ranks; it is killed", start)
            return
    if code:
        lines = " | ".join(filter(None, others[-_SHOWN:])) or "no message on standard output"
        where = f" on {', '.join(hosts)}" if hosts else ""
        if hosts:  # what torchrun would start on this one alone
            remedy = "; reach --hosts without a password, as by `ssh HOST true`"
        raise RunError(
            f"--start {start}: its command{where} ended with code {code}: {lines}{remedy}"
        )


def join_world(
    world: World,
    timeout_s: float,
    backends: Sequence[str] = (GLOO,),
    device: str = CPU,
    **more: Any,
) -> None:
    """Makes this process a rank of the world: one thread, memory that is kept, messages."""
    # Many networks in one process must not push each other's kernels out of oneDNN's cache.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
    keep_memory()  # as in a run, for all rows alike
    place = open_device(device, world.local_rank)
    comm.init(backends, world=world, timeout_s=timeout_s, host_empty=place.host_empty, **more)


def _end(process: subprocess.Popen[bytes], late: threading.Event | None = None) -> None:
    # Ends the command, and with it its ranks: first as it would itself, then at once.
    if late is not None:
        late.set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3.0)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # ranks of a command that has ended


def main() -> None:
    """Runs the job on one rank."""
    text = sys.argv[1]
    task = Path(text[1:]).read_bytes() if text[0] == "@" else text
    job, args = pickle.loads(base64.b64decode(task))
    world = replace(from_environment(), secret=meeting.secret_of_environment())
    for variable in [name for name in os.environ if name.startswith(("TORCHELASTIC_", STARTER))]:
        del os.environ[variable]  # nothing names another rendezvous
    if world.local_size == world.size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no value
    streams.setup_log(world.rank)
    torch.set_num_threads(1)
    module, _, name = job.partition(":")
    code = 1
    try:
        for value in getattr(import_module(module), name)(world, *args):
            if world.rank == 0:
                _send(output, {"value": value})
        if comm.is_initialized():
            comm.barrier()
        code = 0
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, HiresError) and isinstance(error, Exception):
            text = "".join([*traceback.format_exception(error), error_line(error)])
        _send(output, {"error": text, "rank": world.rank})
    sys.stderr.flush()
    os._exit(code)  # threads of a broken transport must not keep it alive


def _send(output: int, message: dict[str, Any]) -> None:
    data = LINE_PREFIX + json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(output, data) :]


if __name__ == "__main__":
    main()
