"""What happens to a run whose checkpoints the disk cannot hold?"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hires.core.ranks.world import World
from hires.core.store import checkpoints, records
from hires.engine import tensorfile
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import attempt, make, numbered

pytestmark = pytest.mark.dist


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


def test_training_whose_last_save_fails_goes_on_when_there_is_room(tmp_path):
    run = make(tmp_path, steps=4, checkpoint={"every": 2})
    with pytest.raises(AssertionError, match="No space left on device; free some space"):
        run_ranks(full_at, 1, str(run), [4])
    assert [path.name for path in (run / checkpoints.FOLDER).iterdir()] == ["step000002"]
    assert attempt(run) == [0]
    assert [one.step for one in checkpoints.whole_checkpoints(run)[0]] == [4, 2]
