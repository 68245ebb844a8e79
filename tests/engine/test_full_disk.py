"""What happens to a run whose checkpoints the disk cannot hold? A tiny one in a mount namespace."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hires import comm
from hires.core.errors import RunError
from hires.core.ranks.world import World
from hires.core.store import checkpoints, records
from hires.engine import tensorfile
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import make, next_number, numbered

pytestmark = pytest.mark.dist

NEWUSER, NEWNS, REMOUNT = 0x10000000, 0x20000, 32


def mount(disk: str, flags: int, size: str) -> None:
    """Mounts a disk of some size, or changes the size."""
    done = ctypes.CDLL(None).mount(b"none", disk.encode(), b"tmpfs", flags, f"size={size}".encode())
    assert done == 0


def with_small_disk(world: World, disk: str) -> Any:
    """Trains on a disk that holds the first of two checkpoints, twice, then on a larger one."""
    maps = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    if ctypes.CDLL(None, use_errno=True).unshare(NEWUSER | NEWNS):
        return os.strerror(ctypes.get_errno())
    for name, text in maps.items():
        Path(f"/proc/self/{name}").write_text(text)
    mount(disk, 0, "2000k")
    # The parameters with their momentum are 1 MiB; everything else that a run leaves is 0.3 MiB.
    keys = {"image": [37, 33], "batch": 4, "steps": 4, "precision": {"name": "fp32"}}
    run, answers = make(Path(disk), **keys, checkpoint={"every": 2}), []
    for size in ("", "", "20m"):
        if size:
            mount(disk, REMOUNT, size)
        try:
            text = str(numbered(world, str(run), next_number(run)))
        except RunError as error:
            text = str(error)
            comm.shutdown()
        there = sorted(path.name for path in (run / checkpoints.FOLDER).iterdir())
        answers.append((text, there, records.read_record(run)))
    return answers


def test_training_that_cannot_be_saved_fails_until_there_is_room(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    [answers] = run_ranks(with_small_disk, 1, str(disk))
    if isinstance(answers, str):
        pytest.skip(f"needs a mount namespace: {answers}")
    *full, (code, there, record) = answers
    for text, left, _ in full:
        assert "No space left on device; free some space" in text
        assert left == ["step000002"]
    assert (code, there, record["state"]) == ("0", ["step000002", "step000004"], "done")


def full_at(world: World, folder: str, steps: list[int]) -> int:
    """Runs an attempt on one rank, for which the disk is full in the saves of some steps."""
    whole = tensorfile.write

    def full(path: Path, *args: Any) -> checkpoints.StoredFile:
        if any(f"{step:06d}" in path.parent.name for step in steps):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, *args)

    tensorfile.write = full
    return numbered(world, folder, 0)


def test_failed_save_on_the_way_is_counted(tmp_path):
    run = make(tmp_path, steps=5, checkpoint={"every": 2})
    assert run_ranks(full_at, 1, str(run), [2, 4]) == [0]
    record = records.read_record(run)
    assert (record["state"], record["failed_saves"]) == ("done", [2, 4])
    assert [one.step for one in checkpoints.whole_checkpoints(run)[0]] == [5]
