"""Strangers at the ports at which torch listens for ranks: the store of rank 0, and gloo."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hires.core.python_command import code_command
from hires.core.ranks import ports

pytestmark = [pytest.mark.dist, pytest.mark.slow]

RANK = """
import sys, time, torch
from hires import comm
from hires.core.ranks.world import World
rank, port, local_size = map(int, sys.argv[1:])
time.sleep(4 * rank)  # meanwhile rank 0 waits at the store
world = World(rank, 2, rank % local_size, local_size, "127.0.0.1", port, 0)
comm.init(world=world, timeout_s=60, shared_memory=False)
for number in range(30):
    [group] = comm.make_groups([[0, 1]], 0).values()
    assert comm.all_gather_stacked(torch.tensor([rank]), group).flatten().tolist() == [0, 1]
    time.sleep(0.1)
comm.barrier()
comm.shutdown()
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("local_size", [1, 2])
def test_ranks_meet_and_sum_while_strangers_call(monkeypatch, local_size):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with ports.reserve(0) as port:
        words = str(port), str(local_size)
        ranks = [subprocess.Popen(code_command(RANK, str(r), *words)) for r in range(2)]
    attacked, kept, number = set(), [], 0
    until = time.monotonic() + 120
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        for place in listening(ranks):
            attacked.add(place)
            for attack in ATTACKS:
                with contextlib.suppress(OSError):
                    stranger = socket.create_connection(("127.0.0.1", place), timeout=1)
                    stranger.settimeout(0.5)
                    kept.append(stranger)
                    stranger.sendall(attack)
                number += 1
        for stranger in kept[:-200]:
            stranger.close()
        del kept[:-200]
        time.sleep(0.2)
    for stranger in kept:
        stranger.close()
    for rank in ranks:
        rank.kill()
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert (port in attacked) == (local_size == 1)  # ranks of one machine have no store there
    assert len(attacked) > 1
    assert number > 20
