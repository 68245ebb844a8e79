"""The whole way on a disk that is really full: a tiny file system in a mount namespace."""

import json
import os
import subprocess
import sys

import pytest

from tests.launcher.conftest import ROOT

IN_NAMESPACE = 'mount -t tmpfs -o size=256k none "$1" && exec "$2" "$3" "$1"'

SCRIPT = """
import json, sys
from pathlib import Path
from hires.core.store import records, rundir
from hires.core.config.run_config import MeasureConfig, RunConfig
from hires.core.errors import RunError
from hires.launcher.local import local_launcher as local
disk = Path(sys.argv[1])
config = RunConfig(steps=3, results=str(disk / "results"), measure=MeasureConfig(warmup=1))
run = rundir.create(config, {"world": 2}, ["hires", "run"])
outcome = local.launch(run, 0, module="tests.helpers.fake_rank")
said = {"state": outcome.state, "cause": outcome.cause}
said["files"] = [str(p.relative_to(disk)) for p in disk.rglob("*")]
said["record"] = (run.path / "record.json").exists() and records.read_record(run)["state"]
try:
    rundir.create(RunConfig(seed=1, results=str(disk / "results")), {"world": 2}, [])
    said["create"] = "made"
except RunError as error:
    said["create"] = str(error)
said["runs"] = len(list((disk / "results/default").iterdir()))
print(json.dumps(said))
"""


def in_tiny_disk(tmp_path, ranks):
    """Returns what the script says that runs a world of fake ranks on a disk of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "HIRES_FAKE_RANKS": json.dumps(ranks)}
    environ["PYTHONPATH"] = str(ROOT)
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", IN_NAMESPACE, "sh"]
    try:
        done = subprocess.run(
            [*command, disk, sys.executable, script],
            env=environ,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if not done.stdout and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"needs a mount namespace: {done.stderr}")
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_run_on_a_full_disk_fails_with_the_reason(tmp_path):
    said = in_tiny_disk(tmp_path, {"0": "full", "1": "hang"})
    assert said["state"] == "failed"
    assert "full" in said["cause"] or "No space left" in said["cause"]
    assert said["record"] in (False, "failed")
    assert not [name for name in said["files"] if name.endswith(".tmp")]


def test_run_that_cannot_be_made_on_a_full_disk_leaves_nothing(tmp_path):
    said = in_tiny_disk(tmp_path, {"0": "full", "1": "hang"})
    assert "No space left on device; free some space" in said["create"]
    assert said["runs"] == 1
