"""Starts Python modules as child processes, by forks of a warm process where one fits.

Importing torch takes over a second of CPU time, for every rank of every run. A warm process has
imported it once, has one thread (a fork copies no other), and forks instead:

    this process ──request──▶ warm process, :func:`serve`
      │      ▲                  └─fork─▶ go-between ──fork──▶ child, runs the module
      │      └── the kernel makes it a child of this process ──────┘
      └─ waits for it, signals it, dies with it: as with any child

The go-between exits at once. Linux hands its child to the nearest ancestor that is a *subreaper*,
which this process is during a request. So exit codes, signals and ``PR_SET_PDEATHSIG`` work as
after :class:`subprocess.Popen`, and the children outlive a warm process that dies.

Libraries read variables as they are loaded. So a child whose environment differs from the warm
process's in more than :data:`MAY_DIFFER` is a fresh process, as is every child once the warm
process has gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import pkgutil
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.programs import code_command, words_of
from hires.core.python_path import without_empty_entries
from hires.core.store.files import cannot_write

MODULES = [
    "hires.worker",
    "hires.engine.torch_server",
    "hires.engine.memory_meter:load_lazy_parts",
]
"""What a warm process imports before it forks, with the functions that it calls."""
MAY_DIFFER = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("NCCL_SOCKET_IFNAME", "NCCL_RUNTIME_CONNECT", "CUDA_DEVICE_ORDER"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "XDG_CACHE_HOME", "TMPDIR"),
    *("PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "PYTEST_CURRENT_TEST"),
}
"""Variables that are read when they are used, or set anew in a child; so are all ``HIRES_*``."""
ANSWER_S = 60.0
"""How long a warm process may take to import and fork before a fresh process is started."""

_SET_PDEATHSIG, _SET_SUBREAPER = 1, 36  # numbers of Linux's prctl.h
_MADV_POPULATE_READ = 22
_SERVER = f"from {__name__} import serve; serve()"

Child = subprocess.Popen[bytes]
"""A process that this one started."""
Request = dict[str, Any]


class Adopted(Child):
    """A child that a warm process forked: all of Popen except the start."""

    def __init__(self, pid: int) -> None:
        self._adopted = pid
        super().__init__(str(pid))

    def _execute_child(self, *_: object) -> None:
        self.pid, self._child_created = self._adopted, True


class WarmProcess:
    """This process's end of a warm process, which is started with the first request."""

    def __init__(
        self, environ: Mapping[str, str], modules: Sequence[str] = MODULES, kept: bool = False
    ) -> None:
        self.environ = dict(environ)  # under which it imports the modules
        self.kept = kept  # it outlives release()
        self._modules = modules
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._lock = threading.Lock()

    def fits(self, command: Sequence[str], environ: Mapping[str, str]) -> bool:
        """Whether a forked child would do what a fresh process does."""
        different = {name for name, _ in set(environ.items()) ^ set(self.environ.items())}
        return (
            not self._ended
            and bool(words_of(command))
            and all(name in MAY_DIFFER or name.startswith("HIRES_") for name in different)
        )

    def start(self, request: Mapping[str, Any], files: list[int]) -> Adopted | None:
        """Returns a child that runs the request, or None; ``files``: its three streams."""
        request = {**request, "parent": os.getpid()}
        prctl = ctypes.CDLL(None).prctl
        ours, theirs = socket.socketpair()
        # As a subreaper this process adopts the children of its descendants that end.
        with self._lock, ours, theirs:
            try:
                prctl(_SET_SUBREAPER, 1, 0, 0, 0)
                self._send(request, [*files, theirs.fileno()])
                theirs.close()  # so that a child that dies early is seen as the end of the stream
                ours.settimeout(ANSWER_S)
                with ours.makefile("rb") as lines:
                    answer = json.loads(lines.readline())
                child = Adopted(answer["pid"])
                if answer["error"]:
                    child.wait()
                    return None
                ours.sendall(b"\n")  # it is a child of this process now, and may go on
                return child
            except (OSError, ValueError):
                self.end()
                return None
            finally:
                prctl(_SET_SUBREAPER, 0, 0, 0, 0)

    def end(self) -> None:
        """Ends the warm process; its children go on."""
        self._ended = True
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _send(self, request: Mapping[str, Any], files: list[int]) -> None:
        """Sends a request to the warm process, which is started if it was not."""
        if self._channel is None:  # its end, with this process, ends the warm process
            self._channel, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    code_command(_SERVER, str(theirs.fileno()), *self._modules),
                    # OpenBLAS starts threads as it is loaded, and ranks do not use it.
                    env={"OPENBLAS_NUM_THREADS": "1", **self.environ},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        self._channel.settimeout(ANSWER_S)
        socket.send_fds(self._channel, [b"\n"], files)
        self._channel.sendall(json.dumps(request).encode() + b"\n")


_current: WarmProcess | None = None
"""What forks the children of this process; there is one for the whole process."""


def use(warm_process: WarmProcess | None) -> None:
    """Forks the children of this process from a warm process from now on; None: they are fresh."""
    global _current
    _current = warm_process


def release() -> None:
    """Ends a warm process that was to start the ranks of one run only: its memory is not needed."""
    if _current is not None and not _current.kept:
        _current.end()
        use(None)


@contextlib.contextmanager
def warm(threads: int = 1, keep: bool = False) -> Iterator[None]:
    """Forks what is started within the block from one warm process.

    Nothing changes where there is one already; ranks with other ``threads`` are fresh processes.
    """
    if _current is not None:
        yield
        return
    warm_process = WarmProcess({**os.environ, **thread_variables(threads)}, kept=keep)
    use(warm_process)
    try:
        yield
    finally:
        warm_process.end()
        use(None)


def thread_variables(threads: int) -> dict[str, str]:
    """Returns the variables by which a process's libraries choose their number of threads."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def helper_environment() -> dict[str, str]:
    """Returns the environment of a child that computes nothing itself."""
    load = {} if _current is None else _current.environ
    return {**os.environ, **{name: load[name] for name in thread_variables(1) if name in load}}


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    stdout: int,
    stderr: int,
    stdin: int | None = None,
    death_signal: signal.Signals = signal.SIGKILL,
) -> Child:
    """Starts a program as the leader of a session of its own; an OSError: it cannot be started.

    ``python -m MODULE ...`` is forked from the warm process if one fits. For a module SIGUSR2 waits
    until it listens; by default it would end the child. The streams are numbers of files; without
    ``stdin`` nothing can be read. ``death_signal`` comes when this process, or the calling thread,
    ends.
    """
    if "PYTHONPATH" in environ:  # also that of cluster.environment
        environ = {**environ, "PYTHONPATH": without_empty_entries(environ["PYTHONPATH"])}
    with Path(os.devnull).open("rb") as nothing:
        stdin = nothing.fileno() if stdin is None else stdin
        if _current is not None and _current.fits(command, environ):
            with contextlib.suppress(FileNotFoundError):  # this process's folder was removed
                request = {"command": [*command], "environ": {**environ}, "cwd": str(Path.cwd())}
                if child := _current.start(request, [stdin, stdout, stderr]):
                    return child
        return subprocess.Popen(
            command,
            env=environ,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=die_with(os.getpid(), death_signal, bool(words_of(command))),
        )


def start_logged(
    what: str, command: Sequence[str], environ: Mapping[str, str], log: Path, **options: Any
) -> Child:
    """Starts a program, as :func:`start`, with output to a log; a RunError names ``what``."""
    try:
        output = log.open("ab")
    except OSError as error:
        raise cannot_write(log, error) from error
    with output:
        file = output.fileno()
        try:
            return start(command, environ, stdout=file, stderr=file, **options)
        except (OSError, subprocess.SubprocessError) as error:
            raise RunError(f"cannot start {what} with {command[0]}: {error}") from error


def die_with(
    parent: int, number: signal.Signals = signal.SIGKILL, held: bool = False
) -> Callable[[], None]:
    """Returns what a child does before it runs its program, so that it dies with ``parent``.

    The kernel sends it the signal ``number`` when the *thread* of the parent ends that started it.
    With ``held`` SIGUSR2 waits until the child listens.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: the child must not import

    def request() -> None:
        if held:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        prctl(_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)

    return request


def serve() -> None:
    """Is the warm process: imports modules, and forks a child for every request that runs it.

    ``sys.argv`` holds the number of the channel's file and what to import, as ``module`` or, with a
    function that is called then, ``module:function``. In a child the stack unwinds to here and the
    interpreter runs the module as ``python -m`` does, so that exit codes, uncaught exceptions and
    Ctrl-C end it as they end a fresh process.
    """
    number, *modules = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # until a child listens
    channel = socket.socket(fileno=int(number))
    for word in modules:
        loaded = pkgutil.resolve_name(word)
        if callable(loaded):
            torch = sys.modules["torch"]
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # so that it starts none
            loaded()
            torch.set_num_threads(threads)
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        sys.exit("a library has started a thread, which no child would have")
    pages = _resident_file_pages()
    # Collections in a child need not look at, and so copy, the pages that it shares.
    gc.collect()
    gc.freeze()
    request = _next_child(channel, pages)
    if request is not None:
        runpy._run_module_as_main(words_of(request["command"])[0])  # type: ignore[attr-defined]


def _next_child(channel: socket.socket, pages: list[tuple[int, int]]) -> Request | None:
    """Forks a child for every request; returns its request in the child, None at the end."""
    while True:
        first, files, _, _ = socket.recv_fds(channel, 1, 4)
        with channel.makefile("rb") as lines:  # one request at a time: nothing follows the line
            line = lines.readline()
        if not first or not line.endswith(b"\n"):
            return None  # the parent has ended
        go_between = os.fork()
        if go_between:
            for file in files:
                os.close(file)
            os.waitpid(go_between, 0)
            continue
        if os.fork():
            os._exit(0)
        channel.close()
        request: Request = json.loads(line)
        _become_child(request, files, pages)
        return request


def _become_child(request: Request, files: list[int], pages: list[tuple[int, int]]) -> None:
    """Makes this fork what a fresh process would be, once its parent lets it go on."""
    *streams, answer = files
    with socket.socket(fileno=answer) as parent:
        error = ""
        try:
            # Only when the go-between has ended is this process a child of the one that asked.
            deadline = time.monotonic() + ANSWER_S
            while os.getppid() != request["parent"]:
                if time.monotonic() > deadline:
                    raise ChildProcessError("the kernel did not hand this process over")
                time.sleep(0.0002)
            die_with(request["parent"])()
            os.setsid()
            os.chdir(request["cwd"])
            # A fork does not copy the pages of libraries. They are in the page cache, and without
            # this would count as memory where a step first touches them.
            madvise = ctypes.CDLL(None).madvise
            for address, size in pages:
                madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_READ)
            _set_interpreter(request, streams)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        parent.sendall(json.dumps({"pid": os.getpid(), "error": error}).encode() + b"\n")
        if error or not parent.recv(1):
            os._exit(1)


def _resident_file_pages() -> list[tuple[int, int]]:
    """Returns address and bytes of every run of pages that this process has mapped of files."""
    import numpy as np  # what starts ranks does without it

    page, runs = resource.getpagesize(), list[tuple[int, int]]()
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        for mapping in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, _, _, inode, *_ = mapping.split()
            first, end = (int(address, 16) // page for address in addresses.split("-"))
            if inode == "0":
                continue
            pagemap.seek(8 * first)
            present = np.frombuffer(pagemap.read(8 * (end - first)), np.int64) < 0  # bit 63
            edges = np.flatnonzero(np.diff(present, prepend=False, append=False)).tolist()
            for begin, stop in zip(edges[::2], edges[1::2], strict=True):
                runs.append(((first + begin) * page, (stop - begin) * page))
    return runs


def _set_interpreter(request: Request, streams: list[int]) -> None:
    """Sets all that the interpreter derives from command, environment, folder and streams."""
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.orig_argv = request["command"]
    module, *words = words_of(request["command"])
    sys.argv = ["-m", *words]
    sys.modules.pop(module, None)  # it runs as __main__
    tempfile.tempdir = None
    with contextlib.suppress(KeyError):
        sys.modules["numpy"].random.seed()  # the generator was copied
    for number, stream in enumerate(streams):  # which were not used yet
        os.dup2(stream, number)
        os.close(stream)
    unbuffered = "PYTHONUNBUFFERED" in os.environ
    sys.stdout.reconfigure(  # type: ignore[union-attr]
        line_buffering=unbuffered or os.isatty(1), write_through=unbuffered
    )
    faulthandler.disable()
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
