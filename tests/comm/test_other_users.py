"""Other users of the machine play strangers where ranks meet: they read, set, delete and flood.

And strangers of any machine call at the ports at which torch listens: the store, and gloo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
import socket
import stat
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hires import comm
from hires.core.errors import CommError
from hires.core.ranks import meeting
from hires.core.ranks.world import World
from tests.helpers.patience import until
from tests.helpers.ranks import error_of, run_ranks

pytestmark = pytest.mark.dist
STRANGER = 65534
needs_users = pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")
_MAGIC = (0x3C85F7CE).to_bytes(4, "little")
ATTACKS = (
    b"",
    b"\xff" * 100_000,
    b"GET / HTTP/1.1\r\n\r\n",
    b"[" * 50_000,
    b"Z" * 2**20,  # zeros are the number of a pair: gloo takes them for its peer
    b"\x09" + _MAGIC + b"\x00" + (2**62).to_bytes(8, "little") + b"key",  # sets a key of 2^62 bytes
    b"\x09" + _MAGIC + b"\x7f" * 100,
)


def fork_stranger(way: str, port: int, connected: Path) -> None:
    """Another user sets, deletes or floods what is in the store at a port, until this process ends.

    ``connected`` has a byte as soon as it is there.
    """
    parent, file = os.getpid(), os.open(connected, os.O_WRONLY | os.O_CREAT)
    if os.fork():
        return
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    number, store = 0, None
    while os.getppid() == parent:
        with contextlib.suppress(Exception):
            if store is None:
                wait = datetime.timedelta(seconds=1)
                store = dist.TCPStore("127.0.0.1", port, None, False, wait, wait_for_workers=False)
                os.write(file, b"x")
            number += 1
            if way == "flood":
                store.set(f"{number}" * 20, "0" * 1000)
            for key in store.list_keys() if way != "flood" else ():
                store.set(key, '["x", "x"]') if way == "set" else store.delete_key(key)
    os._exit(0)


class Attacks:
    """What strangers send to the ports at which this process listens."""

    def __init__(self) -> None:
        self.places: set[tuple[str, int]] = set()
        self.kept: list[socket.socket] = []
        self.lock = threading.Lock()

    def once(self) -> None:
        with self.lock:
            self._call()

    def _call(self) -> None:
        inodes = set()
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").rstrip("]"))
        for file in ("/proc/net/tcp", "/proc/net/tcp6"):
            for row in map(str.split, Path(file).read_text().splitlines()[1:]):
                if row[3] == "0A" and row[9] in inodes:
                    address, port = row[1].split(":")
                    self.places.add((address, int(port, 16)))
        for (_, port), text in ((place, text) for place in self.places for text in ATTACKS):
            with contextlib.suppress(OSError):
                one = socket.create_connection(("127.0.0.1", port), timeout=1)
                one.settimeout(0.1)
                self.kept.append(one)
                one.sendall(text)


def join_among_strangers(
    world: World, way: str, local_size: int, timeout_s: float, folder: str
) -> tuple[str, set[tuple[str, int]], int]:
    """Returns a rank's error, where it listened, and how often strangers called there."""
    os.environ["XDG_RUNTIME_DIR"] = folder
    connected, done = Path(folder, "connected"), Path(folder, "done")
    local = {"local_rank": world.rank % local_size, "local_size": local_size}
    world = dataclasses.replace(world, **local, secret="0123456789abcdef")
    if world.rank == 0 and local_size == 1:
        fork_stranger(way, world.port, connected)
    if world.rank == 1 and local_size == 1:  # the stranger is at the store before it
        until(lambda: connected.exists() and connected.stat().st_size)
    attacks, errors = Attacks(), list[str]()

    def join() -> None:
        backends = ("gloo",) if local_size == 1 else ("gloo", "shm")
        comm.init(backends, world=world, timeout_s=timeout_s)
        if way == "flood":
            attacks.once()
        for backend in backends:
            group, total = comm.new_group(), torch.ones(3)
            comm.all_reduce(total, group=group, backend=backend)
            assert total.tolist() == [2.0] * 3
        comm.max_all(0, patient=True)
        comm.shutdown()

    def run() -> None:
        errors.append(error_of(join))
        if "proof" in errors[0]:
            done.touch()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while way == "flood" and not errors:
        attacks.once()
        thread.join(0.1)
    until(lambda: errors or done.exists())  # the other rank may wait for its whole limit
    return errors[0] if errors else "", attacks.places, len(attacks.kept)


@needs_users
@pytest.mark.parametrize(
    ("way", "limit_s", "words"),
    [("set", 40, "no proof of the ranks' secret"), ("delete", 2, "time|proof")],
)
def test_stranger_at_the_store_between_machines_ends_the_start_by_name_at_most(
    tmp_path, way, limit_s, words
):
    answers = run_ranks(join_among_strangers, 2, way, 1, limit_s, str(tmp_path))
    assert any(re.search(words, error) for error, *_ in answers), answers


@needs_users
@pytest.mark.parametrize("local_size", [1, 2])
def test_ranks_meet_and_sum_while_strangers_call_and_flood(tmp_path, local_size):
    """Those of one machine listen on its loopback alone, and serve no store."""
    answers = run_ranks(join_among_strangers, 2, "flood", local_size, 75, str(tmp_path))
    assert [error for error, *_ in answers] == ["", ""]
    assert sum(calls for *_, calls in answers) > 20
    addresses = {address for _, places, _ in answers for address, _ in places}
    assert (addresses == {socket.inet_aton("127.0.0.1")[::-1].hex().upper()}) == (local_size == 2)


def join_silent(world: World, port: int) -> str:
    """Returns the error of rank 1, at whose address a stranger listens and never answers."""
    late = World(1, 2, 0, 1, "127.0.0.1", port, 0)
    return error_of(lambda: comm.init(["gloo"], world=late, timeout_s=0.5))


def test_listener_that_never_answers_is_named_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        [error] = run_ranks(join_silent, 1, silent.getsockname()[1])
    assert "has not answered in time" in error


@needs_users
@pytest.mark.parametrize("kind", ["folder", "link", "open"])
def test_folder_that_a_stranger_made_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "hires"
    if kind == "link":
        (tmp_path / "other").mkdir(0o700)
        folder.symlink_to(tmp_path / "other")
    else:
        folder.mkdir(0o700)
        folder.chmod(0o770 if kind == "open" else 0o700)
        os.chown(folder, STRANGER if kind == "folder" else os.geteuid(), -1)
    with pytest.raises(CommError, match=r"hires.*mode 700.*XDG_RUNTIME_DIR"):
        meeting.private_folder()


@needs_users
@pytest.mark.parametrize("kind", ["owner", "link", "open"])
def test_file_that_a_stranger_made_is_refused(tmp_path, kind):
    path = tmp_path / "secret"
    path.touch(0o600)
    if kind == "owner":
        os.chown(path, STRANGER, -1)
    elif kind == "open":
        path.chmod(0o640)
    else:
        path = path.rename(tmp_path / "other")
        (tmp_path / "secret").symlink_to(path)
    with pytest.raises(OSError, match=r"mode 600|symbolic links"):
        meeting.open_own("secret", os.O_RDONLY, tmp_path)


def test_folder_in_tmp_is_used_where_the_runtime_folder_is_not_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "TMP", tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    runtime.chmod(0o777)  # where any user may replace what is in it
    for place in (runtime, tmp_path / "none"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
        folder = meeting.private_folder()
        assert folder.parent == tmp_path / "tmp"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "tmp").chmod(0o777)
    with pytest.raises(CommError, match="1777"):
        meeting.private_folder()
