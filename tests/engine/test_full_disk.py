"""What happens to a run whose checkpoints the disk cannot hold? A tiny one in a mount namespace."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hires.core.ranks.world import World
from hires.core.store import attempts, checkpoints, records
from hires.engine import tensorfile
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import attempt, make, numbered

pytestmark = pytest.mark.dist

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = ["model=preact_resnet", "model.n=1", "image=[37,33]", "batch=4", "steps=4"]
# The parameters with their momentum are 1 MiB; everything else that a run leaves is 0.3 MiB.
IN_NAMESPACE = """
disk=$1; size=$2; shift 2
mount -t tmpfs -o size=$size none "$disk" || exit 99
for size in 0 0 20m; do
    test $size = 0 || mount -o remount,size=$size "$disk"
    "$@" >"$disk.out"
    echo "code $?"
    ls "$disk"/*/*/checkpoints
done
cat "$disk"/*/*/record.json
"""


def test_training_that_cannot_be_saved_fails_until_there_is_room(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    run = [sys.executable, "-m", "hires", "run", *TINY, "parallel=lp", f"results={disk}"]
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", IN_NAMESPACE, "sh"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    try:
        done = subprocess.run(
            [*command, disk, "2000k", *run, "checkpoint.every=2"],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if done.returncode == 99 or "unshare:" in done.stderr:
        pytest.skip(f"needs a mount namespace: {done.stderr}")
    # It holds the first of the two checkpoints.
    words = ["code 1", "step000002"] * 2 + ["code 0", "step000002", "step000004"]
    assert done.stdout.splitlines()[: len(words)] == words, (done.stdout, done.stderr)
    assert "No space left on device; free some space" in done.stderr
    assert "complete since" not in done.stderr
    assert '"state": "done"' in done.stdout


def full_at(world: World, folder: str, number: int, steps: list[int]) -> int:
    """Runs an attempt on one rank, for which the disk is full in the saves of some steps."""
    whole = tensorfile.write

    def full(path: Path, *args: Any) -> checkpoints.StoredFile:
        if any(f"{step:06d}" in path.parent.name for step in steps):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, *args)

    tensorfile.write = full
    return numbered(world, folder, number, None)


def test_failed_save_on_the_way_is_counted(tmp_path):
    run = make(tmp_path, steps=5, checkpoint={"every": 2})
    assert run_ranks(full_at, 1, str(run), 0, [2, 4]) == [0]
    record = records.read_record(run)
    assert (record["state"], record["failed_saves"]) == ("done", [2, 4])
    assert [one.step for one in checkpoints.whole_checkpoints(run)[0]] == [5]


@pytest.mark.parametrize(
    ("saving", "full", "left"),
    [
        ({"at_end": "always"}, [5], 0),
        ({"every": 2}, [5], 4),
        ({"every": 2, "at_end": "never"}, [2, 4], 0),
    ],
)
def test_training_whose_last_save_failed_is_not_done_and_goes_on(tmp_path, saving, full, left):
    run = make(tmp_path, steps=5, checkpoint=saving)
    with pytest.raises(AssertionError, match="No space left on device"):
        run_ranks(full_at, 1, str(run), 0, full)
    assert records.done_attempt(run) is None
    assert attempts.next_attempt(run) == 1
    assert attempt(run) == [0]
    record = records.read_record(run)
    assert record["state"] == "done"
    assert (record["resumed"] or {"step": 0})["step"] == left
    assert checkpoints.whole_checkpoints(run)[0]
