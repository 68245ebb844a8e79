"""Imports what ranks need, then forks itself for every request: the other end of ``spawn``.

It has one thread, for a fork copies no other. What a child needs is set between the fork and its
module's first line: session, signals, environment, folder and standard streams. Then
the stack unwinds to :func:`main` and the interpreter runs the module as ``python -m`` does, so that
exit codes, uncaught exceptions and Ctrl-C end the child as they end a fresh process:

    main ─ _serve ──┬─ waits for the next request        (this process)
                    ├─ fork: go-between, exits
                    └─ fork: child ─ returns to main ─ the module
"""

from __future__ import annotations

import atexit
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
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from hires.core.programs import words_of
from hires.launcher.ranks import spawn

Request = dict[str, Any]

_MADV_POPULATE_READ = 22
_PAGE = resource.getpagesize()
_library_pages: list[tuple[int, int]] = []
"""Address and bytes of the pages of files that are in use once everything is imported."""


def main() -> None:
    """Imports modules, and forks a child for every request that runs the request's module.

    ``sys.argv`` holds the number of the channel's file and what to import, as ``module`` or, with a
    function that is called then, ``module:function``.
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
    _library_pages.extend(_resident_file_pages())
    # Collections in a child need not look at, and so copy, the pages that it shares.
    gc.collect()
    gc.freeze()
    request = _serve(channel)
    if request is None:
        return
    code = 0
    try:
        runpy._run_module_as_main(words_of(request["command"])[0])  # type: ignore[attr-defined]
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        code = int(end.code or 0) & 0xFF
    # As the interpreter ends, but for the modules of torch, which take a quarter second to undo.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _serve(channel: socket.socket) -> Request | None:
    """Forks a child for every request; returns its request in the child, None at the end."""
    while True:
        first, files, _, _ = socket.recv_fds(channel, 1, 4)
        with channel.makefile("rb") as lines:  # one request at a time: nothing follows the line
            line = lines.readline()
        if not first or not line.endswith(b"\n"):
            return None  # the parent has ended
        request: Request = json.loads(line)
        go_between = os.fork()
        if go_between:
            for file in files:
                os.close(file)
            os.waitpid(go_between, 0)
            continue
        if os.fork():
            os._exit(0)
        channel.close()
        _become_child(request, files)
        return request


def _become_child(request: Request, files: list[int]) -> None:
    """Makes this fork what a fresh process would be, once its parent lets it go on."""
    *streams, answer = files
    with socket.socket(fileno=answer) as parent:
        error = ""
        try:
            # Only when the go-between has ended is this process a child of the one that asked.
            deadline = time.monotonic() + spawn.ANSWER_S
            while os.getppid() != request["parent"]:
                if time.monotonic() > deadline:
                    raise ChildProcessError("the kernel did not hand this process over")
                time.sleep(0.0002)
            spawn.die_with(request["parent"])()
            os.setsid()
            os.chdir(request["cwd"])
            # A fork does not copy the pages of libraries. They are in the page cache, and without
            # this would count as memory where a step first touches them.
            madvise = ctypes.CDLL(None).madvise
            for address, size in _library_pages:
                madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_READ)
            _set_environment(request)
            _set_streams(streams)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        parent.sendall(json.dumps({"pid": os.getpid(), "error": error}).encode() + b"\n")
        if error or not parent.recv(1):
            os._exit(1)


def _resident_file_pages() -> list[tuple[int, int]]:
    """Returns address and bytes of every run of pages that this process has mapped of files."""
    runs = []
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        for mapping in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, _, _, inode, *_ = mapping.split()
            first, end = (int(address, 16) // _PAGE for address in addresses.split("-"))
            if inode == "0":
                continue
            pagemap.seek(8 * first)
            present = np.frombuffer(pagemap.read(8 * (end - first)), np.int64) < 0  # bit 63
            edges = np.flatnonzero(np.diff(present, prepend=False, append=False)).tolist()
            runs += [
                ((first + begin) * _PAGE, (stop - begin) * _PAGE)
                for begin, stop in zip(edges[::2], edges[1::2], strict=True)
            ]
    return runs


def _set_environment(request: Request) -> None:
    """Sets everything that the interpreter derives from command, environment and folder."""
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.orig_argv = request["command"]
    module, *words = words_of(request["command"])
    sys.argv = ["-m", *words]
    sys.modules.pop(module, None)  # it runs as __main__
    tempfile.tempdir = None
    with contextlib.suppress(KeyError):
        sys.modules["numpy"].random.seed()  # the generator was copied


def _set_streams(streams: list[int]) -> None:
    """Makes the received files standard input, output and error, which were not used yet."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    unbuffered = "PYTHONUNBUFFERED" in os.environ
    sys.stdout.reconfigure(  # type: ignore[union-attr]
        line_buffering=unbuffered or os.isatty(1), write_through=unbuffered
    )
    faulthandler.disable()
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
