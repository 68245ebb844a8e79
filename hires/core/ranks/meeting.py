"""Lets the ranks of a world meet where no other user can: a secret, and a private folder.

The ranks of one machine find each other in a folder that this user alone can enter:

    XDG_RUNTIME_DIR/hires, else /tmp/hires-UID             mode 700, owner checked
      meet-NAME     secret of a meeting; rank 0 holds a lock on it while it lives
      SECRET        folder of that meeting, with its store

NAME follows from what all ranks have: the secret of a run, or address and port of their world. What
a killed rank 0 left behind is known by its lock being free. Between machines no folder is private,
so texts carry a proof of the secret (:func:`proof`), and so do the names of the files in memory
through which ranks of one machine exchange messages. Such a file has a name only until all ranks
have opened it; its maker holds a lock on it until then. Between machines a transport takes, left
alone, the address of the host's own name, which is often the loopback: the one that leads to the
others is found here, too, and a free port is kept until rank 0 listens on it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import ipaddress
import os
import platform
import secrets
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hires.core.errors import CommError, ConfigError, RunError
from hires.core.store import file_names, trust
from hires.core.store.files import cannot_write
from hires.core.units import size

if TYPE_CHECKING:
    from hires.core.ranks.world import World

VARIABLE = "HIRES_SECRET"
"""Variable with the secret of programs that are no run, on several machines."""
FEWEST_LETTERS = 16
PROOF_BYTES = 32
TMP = Path("/tmp")  # on a local disk, whatever TMPDIR is
_PREFIX = "meet-"
_POLL_S, _SEEN_S = 0.01, 10.0
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def proof(secret: str, *texts: str | bytes) -> bytes:
    """Returns what only those can compute who have the secret."""
    parts = [text.encode() if isinstance(text, str) else text for text in texts]
    sizes = ",".join(str(len(part)) for part in parts).encode()
    return hmac.digest(secret.encode(), b"\0".join([sizes, *parts]), "sha256")


def secret_of_environment() -> str:
    """Returns the secret that the user has set, or an empty one; ConfigError: it is too short."""
    secret = os.environ.get(VARIABLE, "")
    if secret and len(secret) < FEWEST_LETTERS:
        raise ConfigError(
            f"{VARIABLE} has {len(secret)} letters, which can be guessed; use {FEWEST_LETTERS} or "
            f"more, as `openssl rand -hex 16` prints, the same on all machines"
        )
    return secret


def write_secret(path: Path) -> None:
    """Writes a new secret, for this user alone; RunError: it cannot."""
    try:
        path.unlink(missing_ok=True)
        handle = open_own(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(16))
    except OSError as error:
        raise cannot_write(path, error) from error


def with_secret(world: World, folder: Path) -> World:
    """Returns the world of ranks that a supervisor started, with the secret in an attempt's folder.

    CommError: it is missing, or another user could know it.
    """
    path, until = folder / file_names.SECRET, time.monotonic() + _SEEN_S
    while world.size > 1:  # file servers show new files late
        try:
            with os.fdopen(open_own(path.name, os.O_RDONLY, folder)) as file:
                return replace(world, secret=file.read(1024))
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or time.monotonic() > until:
                raise CommError(
                    f"the secret of the ranks cannot be read from {path}: "
                    f"{error.strerror or error}; start the run with `hires run` or its launch.sh"
                ) from None
        time.sleep(_POLL_S)
    return world


def open_own(name: str, flags: int, folder: Path) -> int:
    """Opens a file of a folder; OSError: it is a link, not this user's, or open to others."""
    handle = os.open(folder / name, flags | _OPEN, 0o600)
    facts = os.fstat(handle)
    kind, rights = stat.S_ISREG(facts.st_mode), stat.S_IMODE(facts.st_mode) & 0o077
    if kind and facts.st_uid == os.geteuid() and not rights:
        return handle
    os.close(handle)
    raise PermissionError(0, f"it must be a file of user {os.geteuid()} alone, of mode 600")


def private_folder() -> Path:
    """Returns the folder that this user alone can enter; CommError: another user has made it."""
    user, runtime = os.geteuid(), os.environ.get("XDG_RUNTIME_DIR", "")
    folder = TMP / f"hires-{user}"
    is_there = Path(runtime).is_absolute() and Path(runtime).is_dir()
    if is_there and not trust.distrust_parent(Path(runtime)):
        folder = Path(runtime) / "hires"
    elif why := trust.distrust_parent(TMP):
        raise CommError(f"ranks meet in {TMP}, which {why}; let it have mode 1777")
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        facts = folder.lstat()
    except OSError as error:
        raise CommError(f"ranks cannot meet in {folder}: {error.strerror}") from None
    if facts.st_uid != user or not stat.S_ISDIR(facts.st_mode) or facts.st_mode & 0o077:
        raise CommError(
            f"ranks meet in {folder}, which must be a folder of user {user} of mode 700 and is of "
            f"user {facts.st_uid}, {stat.filemode(facts.st_mode)}: another user may have made it; "
            f"remove it, or name a folder of your own with XDG_RUNTIME_DIR"
        )
    return folder


@contextlib.contextmanager
def held(name: str, until_s: float) -> Iterator[str]:
    """Yields a new secret that other processes of this user find under a name, on rank 0.

    CommError: another process holds the name, until so late by the monotonic clock.
    """
    folder, secret = private_folder(), secrets.token_hex(16)
    while _remove_left_behind(folder, name):
        if time.monotonic() > until_s:
            raise CommError(
                "another program of this user meets at the same address and port; choose another "
                "MASTER_PORT"
            )
        time.sleep(_POLL_S)
    handle, temporary = tempfile.mkstemp(dir=folder)  # of mode 600
    path = folder / f"{_PREFIX}{name}"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, secret.encode())
        (folder / secret).mkdir(0o700)
        Path(temporary).rename(path)
        yield secret
    finally:
        for left in (path, Path(temporary)):
            left.unlink(missing_ok=True)
        shutil.rmtree(folder / secret, ignore_errors=True)
        os.close(handle)


def found(name: str) -> str:
    """Returns the secret under a name, or an empty one if no process that lives holds it."""
    with contextlib.suppress(FileNotFoundError):
        handle = open_own(f"{_PREFIX}{name}", os.O_RDONLY, private_folder())
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.read(handle, 64).decode()
        finally:
            os.close(handle)
    return ""


def left_behind(folder: Path, prefix: str) -> Iterator[tuple[Path, int]]:
    """Yields the files of this user alone that killed processes left, each with its handle.

    The process that makes such a file holds a lock on it until it ends.
    """
    for path in sorted(folder.glob(f"{prefix}*")):
        with contextlib.suppress(OSError):  # it is gone, no such file, or its maker lives
            handle = open_own(path.name, os.O_RDONLY, folder)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_nlink:  # else removed by another, and maybe made anew
                    yield path, handle
            finally:
                os.close(handle)


def _remove_left_behind(folder: Path, name: str) -> bool:
    # Removes what killed processes left; returns whether one that lives holds the name.
    for path, handle in left_behind(folder, _PREFIX):
        shutil.rmtree(folder / os.read(handle, 64).decode(), ignore_errors=True)
        path.unlink(missing_ok=True)
    return (folder / f"{_PREFIX}{name}").exists()


FOLDER = Path("/dev/shm")  # a file system in memory
_MAIL = "hires-mail-"
_SPARE_BYTES = 2**24
"""Left to other programs, or an eighth of a file system that is small."""
_YOUNG_S = 60.0
"""A file that is younger may not have been locked yet."""


def keeps_write_order() -> bool:
    """Whether other cores of this machine see writes in the order in which they were made."""
    return platform.machine() in ("x86_64", "AMD64")


def memory_folder() -> Path:
    """Returns where the files are made."""
    return FOLDER if FOLDER.is_dir() else Path(tempfile.gettempdir())


def free_memory() -> int:
    """Returns how many bytes may be made; raises OSError where that is unknown."""
    facts = os.statvfs(memory_folder())
    spare = min(_SPARE_BYTES, facts.f_blocks * facts.f_frsize // 8)
    return max(0, facts.f_bavail * facts.f_frsize - spare)


@contextlib.contextmanager
def memory_file(name: str, num_bytes: int, what: str) -> Iterator[int]:
    """Makes a file of zeros that only this user may read, and removes its name at the end.

    Yields its handle. Others open it with :func:`open_memory_file`, by a name that no stranger can
    guess.

    Raises:
        RunError: there is no room; ``what`` needs it.
    """
    with contextlib.ExitStack() as stack:
        try:
            for path in left_memory_files():
                path.unlink(missing_ok=True)
            if (free := free_memory()) < num_bytes:
                raise _no_room(num_bytes, what, f"{size(free)} free")
            handle = open_own(_MAIL + name, os.O_RDWR | os.O_CREAT | os.O_EXCL, memory_folder())
            stack.callback(os.close, handle)
            stack.callback((memory_folder() / (_MAIL + name)).unlink, missing_ok=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Allocated, not only sized: a full file system raises here, instead of SIGBUS later.
            os.posix_fallocate(handle, 0, num_bytes)
        except OSError as error:
            raise _no_room(num_bytes, what, error.strerror or str(error)) from None
        yield handle


def open_memory_file(name: str) -> int:
    """Opens the file of a name; OSError: there is none, or another user could have made it."""
    return open_own(_MAIL + name, os.O_RDWR, memory_folder())


def left_memory_files() -> list[Path]:
    """Returns the files of this user whose maker was killed before it could remove them."""
    files = left_behind(memory_folder(), _MAIL)
    return [path for path, file in files if time.time() - os.fstat(file).st_mtime > _YOUNG_S]


def _no_room(num_bytes: int, what: str, why: str) -> RunError:
    return RunError(
        f"{what} needs {size(num_bytes)} of shared memory in {memory_folder()}: {why}; free some "
        f"there, make it larger (of a container: --shm-size), or do without it: "
        f"comm.shared_memory=false, and a backend other than shm"
    )


_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_NO_MATTER = 9  # a port; no packet is sent


def own_address_towards(host: str) -> str:
    """Returns this machine's address towards ``host``; raises OSError if no network leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _NO_MATTER))  # chooses a route and sends nothing
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """Returns the interface of :func:`own_address_towards`, or None if it cannot be determined."""
    with contextlib.suppress(OSError):
        address = own_address_towards(host)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                if address_of(name) == address:
                    return name
    return None


def address_of(interface: str) -> str:
    """Returns the IPv4 address of an interface of this machine; raises OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])


def is_loopback(address: str) -> bool:
    """Returns whether an address leads from every machine to that machine itself."""
    return ipaddress.ip_address(address).is_loopback


@contextlib.contextmanager
def reserve_port(port: int) -> Iterator[int]:
    """Yields the port to use, ``port`` itself or any free one for 0, and keeps it until the end.

    Rank 0 listens there, seconds after the port was chosen. Until then it is bound here without
    listening: the system gives it to no other process, but a socket that allows reuse, as that of
    torch's store, may listen at it. Another launcher that wants this very port could bind it in the
    same way; so each launcher also takes a name that only one process may have.
    """
    with socket.socket() as kept, socket.socket(socket.AF_UNIX) as name:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            kept.bind(("", port))
            number = int(kept.getsockname()[1])
            # A socket without a file, of all users and containers that share the network.
            name.bind(f"\0hires-port-{number}")
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is taken" if taken else f"cannot be used ({error.strerror})"
            remedy = "choose another one, or launcher.port=0 for any free port"
            raise ConfigError(f"launcher.port={port} {why}; {remedy}") from None
        yield number
