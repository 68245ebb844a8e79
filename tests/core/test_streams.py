"""A command does its work whoever reads its output, and whatever the streams can take."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launches import ROOT

HIRES = shlex.join([sys.executable, "-m", "hires"])


SMALL = "image=16 batch=2 model=unet model.width=4 model.levels=1 steps=3 measure.warmup=1"


def shell(line: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of bash; its exit code is that of the first command of a pipe."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    line = f"set -o pipefail; {line}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=environ, timeout=120, capture_output=True, text=True
    )


AS_NOBODY = (
    "setpriv --reuid 54321 --regid 54321 --clear-groups "
    "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
)
"""As a user without an entry, who may read where Python is installed."""


@pytest.mark.dist
def test_a_run_ends_as_if_somebody_read_also_without_home_and_name(tmp_path):
    tmp_path.chmod(0o777)
    runtime, user = tmp_path / "runtime", ""
    runtime.mkdir(0o700)
    if os.getuid() == 0:  # only root can be another user
        os.chown(runtime, 54321, 54321)
        unset = "env -u HOME -u USER -u LOGNAME -u LNAME -u USERNAME -u XDG_CACHE_HOME"
        user = f"{unset} {AS_NOBODY}"
    line = f"{user} {HIRES} run {SMALL} <&- 2>&1 | true"
    answer = shell(line, tmp_path, XDG_RUNTIME_DIR=str(runtime))
    assert answer.returncode == 0, answer.stderr
    [record] = tmp_path.glob("results/default/*/record.json")
    assert json.loads(record.read_text())["state"] == "done"
    assert (record.parent / "throughput.csv").exists()
    if user:
        assert (runtime / "hires").stat().st_uid == 54321


def test_following_ends_with_its_reader(tmp_path):
    from tests.helpers.run_folders import begin, make_run

    run = make_run(tmp_path / "results")
    log = begin(run) / "logs" / "rank0000.log"
    log.write_text("".join(f"12:00:00.{n % 1000:03d} rank 0: line {n}\n" for n in range(20000)))
    answer = shell(f"timeout 60 {HIRES} logs {run} --follow | head -1", tmp_path)
    assert answer.returncode == 0
    assert "line 0" in answer.stdout


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full", "2>&- | true"])
def test_no_command_fails_for_its_streams(tmp_path, streams):
    answer = shell(f"{HIRES} list models {streams}", tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_signs_without_a_code_are_escaped(tmp_path):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/images/a\xff")).mkdir(parents=True)
    line = f"{HIRES} list models; {HIRES} data check images; {HIRES} show 'żółw ☃'"
    answer = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        timeout=120,
        capture_output=True,
    )
    assert answer.returncode == 2  # there is no such run
    assert "resnet18" in answer.stdout.decode("ascii")
    assert b"Traceback" not in answer.stderr


def test_what_a_killed_rank_has_printed_is_in_its_log():
    code = "import os; from hires.core import streams; streams.secure(); print('5'); os._exit(9)"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}  # as ranks have it
    answer = subprocess.run([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE)
    assert answer.stdout == b"5\n"
