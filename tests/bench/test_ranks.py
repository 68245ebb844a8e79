"""Do the ranks of a benchmark answer, and does none stay behind?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hires.bench.ranks import run_program, run_ranks, stream_ranks
from hires.core.errors import RunError
from tests.conftest import REPOSITORY
from tests.helpers import bench_jobs as jobs
from tests.helpers.patience import until

pytestmark = pytest.mark.dist


def test_rank_0_answers_and_the_environment_of_its_parent_stays():
    before = dict(os.environ)
    assert run_ranks(jobs.add_up, 2, 60, 20) == (0, 41.0)
    assert dict(os.environ) == before


def test_values_come_as_they_are_made():
    assert list(stream_ranks(jobs.count, 2, 60, 3)) == [0, 1, 2]


def test_first_cause_is_told_not_its_consequence():
    with pytest.raises(RunError, match=r"rank 1 failed: PlanError: tile of 1 row is too small"):
        run_ranks(jobs.refuse, 2, 60)


def test_dead_rank_ends_all():
    with pytest.raises(RunError, match="rank 1 failed: it died without a word"):
        run_ranks(jobs.die, 2, 60)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("kill -9 $$", "writing it failed: it was killed by SIGKILL .*memory .*without a message$"),
        ("echo no >&2; kill -11 $$", "it was killed by SIGSEGV; its last words: no$"),
        ("exit 3", "writing it failed: it ended with exit code 3, without a message$"),
        ("echo a >&2; echo b >&2; exit 3", r"writing it failed: a \| b$"),
    ],
)
def test_program_that_ends_without_a_message_has_its_signal_or_code(code, words):
    with pytest.raises(RunError, match=words):
        run_program("writing it", ["sh", "-c", code], 60)


def test_time_limit_is_kept(tmp_path):
    with pytest.raises(RunError, match="not done after 3 s"):
        run_ranks(jobs.sleep, 2, 3, tmp_path)
    assert_gone(tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_command(tmp_path, number):
    script = (
        "from pathlib import Path\n"
        "from hires.bench.ranks import run_ranks\n"
        "from tests.helpers import bench_jobs as jobs\n"
        "if __name__ == '__main__':\n"
        f"    run_ranks(jobs.sleep, 2, 60, Path({str(tmp_path)!r}))\n"
    )
    (tmp_path / "bench_script.py").write_text(script)
    command = [sys.executable, tmp_path / "bench_script.py"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as parent:
        try:
            until(lambda: len(pids(tmp_path)) == 2)
            parent.send_signal(number)
            parent.wait(120)
        finally:
            parent.kill()
    assert_gone(tmp_path)


def pids(folder):
    return [int(text) for text in (p.read_text() for p in folder.glob("*.pid")) if text]


def assert_gone(folder):
    until(lambda: not any(alive(pid) for pid in pids(folder)))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
