"""Calls the NCCL library itself, through ctypes: what it declares, where it lies, its errors.

torch ships the library as a package of its own (``nvidia-nccl-cu13``) or in its own folder. Its
communicators are made non-blocking, so that a rank that waits for others in vain can stop: a call
that is under way returns ``ncclInProgress``, and this process polls the communicator up to a limit.
NCCL 2.18 or newer.

Source:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html; nccl.h of NCCL 2.18
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import time
from collections.abc import Iterator
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from hires.core.errors import CommError, PeerError

LEAST = 21800
"""Oldest version, as ``ncclGetVersion`` counts: 2.18.0."""
SUCCESS, IN_PROGRESS = 0, 7
UNIQUE_ID_BYTES = 128
_POLL_S = 1e-4
_NAME = "libnccl.so.2"


class UniqueId(ctypes.Structure):
    """What the ranks of one communicator share; passed by value."""

    _fields_ = (("internal", c_char * UNIQUE_ID_BYTES),)


class NcclConfig(ctypes.Structure):
    """``ncclConfig_t`` as NCCL 2.18 has it; newer versions read only the first ``size`` bytes."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
    )

    @classmethod
    def non_blocking(cls) -> NcclConfig:
        """Returns the settings of a communicator whose calls return at once."""
        unset = -(2**31)
        size = ctypes.sizeof(cls)
        return cls(size, 0xCAFEBEEF, LEAST, 0, unset, unset, unset, None, unset)


_COUNT = c_size_t
_SEND_RECEIVE = (c_void_p, c_void_p, _COUNT, c_int)
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRankConfig": (
        POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(NcclConfig)
    ),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclCommFinalize": (c_void_p,),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    # from, to, numbers, type, then what is the operation's own, communicator, stream
    "ncclAllReduce": (*_SEND_RECEIVE, c_int, c_void_p, c_void_p),
    "ncclReduce": (*_SEND_RECEIVE, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (*_SEND_RECEIVE, c_int, c_void_p, c_void_p),
    "ncclAllGather": (*_SEND_RECEIVE, c_void_p, c_void_p),
    "ncclReduceScatter": (*_SEND_RECEIVE, c_int, c_void_p, c_void_p),
    # memory, numbers, type, the other rank, communicator, stream
    "ncclSend": (c_void_p, _COUNT, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, _COUNT, c_int, c_int, c_void_p, c_void_p),
    "ncclRedOpCreatePreMulSum": (POINTER(c_int), c_void_p, c_int, c_int, c_void_p),
    "ncclRedOpDestroy": (c_int, c_void_p),
}  # fmt: skip
"""Function -> its arguments; all return a result code."""
_TEXTS = {"ncclGetErrorString": (c_int,), "ncclGetLastError": (c_void_p,)}


class NcclLibrary:
    """The functions of one libnccl."""

    def __init__(self, path: str) -> None:
        """Loads it; CommError: it is none, or too old."""
        try:
            self._library = ctypes.CDLL(path)
            for name, arguments in (SIGNATURES | _TEXTS).items():
                function = getattr(self._library, name)
                function.argtypes = arguments
                function.restype = c_char_p if name in _TEXTS else c_int
        except (OSError, AttributeError) as error:
            raise CommError(
                f"{path} is no NCCL that hires can call: {error}; use comm.backend=nccl or gloo"
            ) from error
        number = c_int()
        self("ncclGetVersion", ctypes.byref(number))
        self.version = number.value
        if self.version < LEAST:
            raise CommError(
                f"{path} is NCCL {version_text(self.version)}; comm.backend=nccl_direct needs "
                f"{version_text(LEAST)} or newer, or use comm.backend=nccl"
            )

    def __call__(self, name: str, *args: Any) -> int:
        """Calls a function; returns ``SUCCESS`` or ``IN_PROGRESS``, CommError: it failed."""
        result: int = getattr(self._library, name)(*args)
        if result not in (SUCCESS, IN_PROGRESS):
            raise CommError(f"{name} failed: {self.text(result)}")
        return result

    def text(self, result: int) -> str:
        """Returns the text of a result code, with the library's last error."""
        said = self._library.ncclGetErrorString(result) or b"unknown error"
        last = self._library.ncclGetLastError(None) or b""
        texts = (part.decode(errors="replace").strip() for part in (said, last))
        return ": ".join(filter(None, texts))

    def error(self, comm: c_void_p | None) -> str | None:
        """Returns what went wrong on a communicator since; None: nothing."""
        state = c_int()
        self("ncclCommGetAsyncError", comm, ctypes.byref(state))
        return None if state.value in (SUCCESS, IN_PROGRESS) else self.text(state.value)

    def settle(self, comm: c_void_p | None, timeout_s: float, what: str) -> None:
        """Returns when a communicator has taken what it was given; CommError: failed, or late."""
        until, state = time.monotonic() + timeout_s, c_int()
        while True:
            self("ncclCommGetAsyncError", comm, ctypes.byref(state))
            if state.value == SUCCESS:
                return
            if state.value != IN_PROGRESS:
                raise PeerError(f"{what} failed: {self.text(state.value)}")
            if time.monotonic() > until:
                raise PeerError(f"{what} took over {timeout_s:g} s")
            time.sleep(_POLL_S)


@functools.cache
def shipped_library() -> NcclLibrary:
    """Returns the library that torch ships, else the system's; CommError: there is none."""
    for path in _places():
        if path.is_file():
            return NcclLibrary(str(path))
    try:
        return NcclLibrary(_NAME)
    except CommError:
        import torch

        raise CommError(
            f"there is no {_NAME} beside torch {torch.__version__}; install a torch that is built "
            f"for CUDA, or use comm.backend=gloo"
        ) from None


def version_text(number: int) -> str:
    """Returns a version in its usual form.

    >>> version_text(21805), version_text(2708)
    ('2.18.5', '2.7.8')
    """
    base = 10000 if number >= 10000 else 1000
    return f"{number // base}.{number % base // 100}.{number % 100}"


def _places() -> Iterator[Path]:
    # Without an import: the package has no modules, and that of torch takes seconds.
    for package, folder in (("nvidia.nccl", "lib"), ("torch", "lib")):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for root in (found.submodule_search_locations or ()) if found else ():
            yield Path(root, folder, _NAME)
