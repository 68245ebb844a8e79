"""What happens to a run whose checkpoint the disk cannot hold? A tiny disk in a mount namespace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = ["model=preact_resnet", "model.n=1", "image=[37,33]", "batch=4", "steps=4"]
# The parameters with their momentum are 1 MiB; everything else that a run leaves is 0.3 MiB.
ROOM = {"900k": [], "2000k": [2]}
"""Size of the disk -> steps of the checkpoints that it holds."""
IN_NAMESPACE = """
disk=$1; size=$2; shift 2
mount -t tmpfs -o size=$size none "$disk" || exit 99
"$@"
echo "code $?"
find "$disk" -path '*checkpoints*' -type d
cat "$disk"/*/*/a0/events.jsonl "$disk"/*/*/a0/logs/rank0001.log
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("room", "whole"), ROOM.items())
def test_full_disk_ends_the_save_and_neither_the_run_nor_the_checkpoint_before(
    tmp_path, room, whole
):
    disk = tmp_path / "disk"
    disk.mkdir()
    run = [sys.executable, "-m", "hires", "run", *TINY, "parallel=lp", f"results={disk}"]
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", IN_NAMESPACE, "sh"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    try:
        done = subprocess.run(
            [*command, disk, room, *run, "checkpoint.every=2"],
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
    assert "code 0" in done.stdout.splitlines(), (done.stdout, done.stderr)
    assert "Throughput" in done.stdout
    left = [line for line in done.stdout.splitlines() if line.startswith(str(disk))]
    assert [Path(line).name for line in left] == ["checkpoints", *(f"step{s:06d}" for s in whole)]
    for step in {2, 4} - set(whole):
        warning = f"warning: no checkpoint of step {step}: writing failed: cannot write "
        assert warning in done.stderr
    assert "No space left on device; free some space" in done.stderr
    assert done.stdout.count('"checkpoint_failed"') >= 2 - len(whole)
