"""Other users of the machine play strangers where ranks meet: they read, set, delete and flood.

And strangers of any machine call at the ports at which torch listens: the store, and gloo.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hires.core.errors import CommError
from hires.core.python_command import code_command
from hires.core.ranks import meeting, ports

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]
STRANGER = 65534
needs_users = pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")
LIMIT_S = 90
RANK = """
import sys, time, torch
import hires.comm as dist
backends, timeout_s, pause_s = sys.argv[1].split(","), float(sys.argv[2]), float(sys.argv[3])
try:
    dist.init(backends, timeout_s=timeout_s)
    print("joined", flush=True)
    time.sleep(pause_s)
    for backend in backends:
        group, total = dist.new_group(), torch.ones(3)
        dist.all_reduce(total, group=group, backend=backend)
        assert total.tolist() == [2.0] * 3
    dist.max_all(0, patient=True)
    dist.shutdown()
except dist.CommError as error:
    print(f"CommError: {error}", flush=True)
    sys.exit(1)
"""
STRANGER_CODE = """
import datetime, os, sys, time
import torch.distributed as dist
os.setgroups([])
os.setgid({user})
os.setuid({user})
way, port = sys.argv[1], int(sys.argv[2])
while True:
    try:
        wait = datetime.timedelta(seconds=1)
        store = dist.TCPStore("127.0.0.1", port, None, False, wait, wait_for_workers=False)
        break
    except RuntimeError:
        time.sleep(0.1)
print("connected", flush=True)
for number in range(10**6):
    if way == "flood":
        store.set(f"{{number}}" * 20, "0" * 1000)
        continue
    for key in store.list_keys():
        if way == "set":
            store.set(key, '["x", "x"]')
        else:
            store.delete_key(key)
"""

_MAGIC = (0x3C85F7CE).to_bytes(4, "little")
ATTACKS = (
    b"",
    b"\xff" * 100_000,
    b"GET / HTTP/1.1\r\n\r\n",
    b"[" * 50_000,
    bytes(2**20),
    b"\x09" + _MAGIC + b"\x00" + (2**62).to_bytes(8, "little") + b"key",  # sets a key of 2^62 bytes
    b"\x09" + _MAGIC + b"\x7f" * 100,
)


def listening(processes: list[subprocess.Popen]) -> set[int]:
    """Returns the ports at which some processes listen."""
    inodes, found = {}, set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in Path(file).read_text().splitlines()[1:]]
        inodes |= {row[9]: int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[3] == "0A"}
    for process in processes:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = str(link.readlink()).removeprefix("socket:[").rstrip("]")
                    found |= {inodes[inode]} if inode in inodes else set()
    return found


class Processes:
    """Ranks of a program of a user's own, and what they printed."""

    def __init__(
        self,
        tmp_path: Path,
        port: int,
        local_size: int,
        *args: object,
        before_rank_1: Callable[[], object] = lambda: None,
    ) -> None:
        self.all = []
        for rank in range(2):
            if rank:
                before_rank_1()
            numbers = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank % local_size}
            numbers |= {"LOCAL_WORLD_SIZE": local_size, "MASTER_PORT": port, "HIRES_ATTEMPT": 0}
            environ = {**os.environ, **{name: str(value) for name, value in numbers.items()}}
            environ |= {"MASTER_ADDR": "127.0.0.1", "XDG_RUNTIME_DIR": str(tmp_path)}
            environ |= {"HIRES_SECRET": "0123456789abcdef", "OMP_NUM_THREADS": "1"}
            environ["PYTHONPATH"] = str(Path(__file__).parents[2])
            command = code_command(RANK, *map(str, args))
            self.all.append(
                subprocess.Popen(
                    command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            )

    def end(self) -> list[tuple[int, str]]:
        """Returns their exit codes and outputs; none is left."""
        try:
            texts = [one.communicate(timeout=LIMIT_S)[0].decode() for one in self.all]
            return [(one.returncode, text) for one, text in zip(self.all, texts, strict=True)]
        finally:
            for one in self.all:
                one.kill()
                one.wait()


def stranger(way: str, port: int) -> subprocess.Popen[bytes]:
    """Starts a stranger that does one thing to what it finds in the store at a port."""
    code = code_command(STRANGER_CODE.format(user=STRANGER), way, str(port))
    return subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/")


@needs_users
@pytest.mark.parametrize(
    ("way", "words"), [("set", "no proof of the ranks' secret"), ("delete", "time|proof")]
)
def test_stranger_at_the_store_between_machines_ends_the_start_by_name_at_most(
    tmp_path, way, words
):
    with ports.reserve(0) as port:
        other = stranger(way, port)
        assert other.stdout is not None
        try:
            # The ranks meet in moments: the stranger is at the store of rank 0 before rank 1 comes.
            come = other.stdout.readline
            limit_s = 40 if way == "set" else 15
            ends = Processes(tmp_path, port, 1, "gloo", limit_s, 1, before_rank_1=come).end()
            assert other.poll() is None or other.returncode
        finally:
            other.kill()
            other.communicate()
    assert any(code == 1 and re.search(words, text) for code, text in ends)
    assert all(code in (0, 1) for code, _ in ends)


@needs_users
@pytest.mark.parametrize("local_size", [1, 2])
def test_ranks_meet_and_sum_while_strangers_call_and_flood(tmp_path, local_size):
    """Those of one machine listen on its loopback alone, and serve no store."""
    attacked, addresses, kept = set[int](), set[str](), list[socket.socket]()

    def attack() -> None:
        here = listening(ranks.all)
        attacked.update(here)
        for file in ("/proc/net/tcp", "/proc/net/tcp6"):
            rows = [line.split()[1].split(":") for line in Path(file).read_text().splitlines()[1:]]
            addresses.update(address for address, port in rows if int(port, 16) in here)
        for place, text in itertools.product(here, ATTACKS):
            with contextlib.suppress(OSError):
                one = socket.create_connection(("127.0.0.1", place), timeout=1)
                one.settimeout(0.3)
                kept.append(one)
                one.sendall(text)

    with ports.reserve(0) as port:
        flood, backends = stranger("flood", port), "gloo" if local_size == 1 else "gloo,shm"
        ranks = Processes(tmp_path, port, local_size, backends, 75, 1)
        try:
            end_s = time.monotonic() + LIMIT_S
            while any(one.poll() is None for one in ranks.all) and time.monotonic() < end_s:
                attack()
                time.sleep(0.1)
            assert [code for code, _ in ranks.end()] == [0, 0]
        finally:
            flood.kill()
            flood.communicate()
    for one in kept:
        one.close()
    assert len(kept) > 20
    assert (port in attacked) == (local_size == 1)
    if local_size == 2:
        assert addresses == {socket.inet_aton("127.0.0.1")[::-1].hex().upper()}
        assert not [*tmp_path.glob("hires/*")]


def test_listener_that_never_answers_is_named_in_time(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ranks = Processes(tmp_path, silent.getsockname()[1], 1, "gloo", 3, 0)
        first = ranks.all.pop(0)  # a stranger has its port
        first.kill()
        first.communicate()
        begun = time.monotonic()
        [(code, text)] = ranks.end()
    assert (code, time.monotonic() - begun < LIMIT_S) == (1, True)
    assert "has not answered in time" in text


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
