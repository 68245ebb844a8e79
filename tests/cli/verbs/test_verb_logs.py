"""Does ``hires logs`` tell what the ranks said, and follow a run from attempt to attempt?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.patience import PATIENCE_S
from tests.helpers.run_folders import begin, done, end, make_run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "results")
    for attempt in range(2):
        logs = begin(folder, attempt) / "logs"
        for rank in range(2):
            text = f"10:00:0{rank}.000 rank {rank}: attempt {attempt}\n"
            (logs / f"rank{rank:04d}.log").write_text(f"{text}10:00:05.000 rank {rank}: loss 2.5\n")
    return folder


def test_latest_attempt_by_time_with_the_rank_in_front(hires, run):
    assert hires("logs", "0123abcd").out.splitlines() == [
        "[0] 10:00:00.000 rank 0: attempt 1",
        "[1] 10:00:01.000 rank 1: attempt 1",
        "[0] 10:00:05.000 rank 0: loss 2.5",
        "[1] 10:00:05.000 rank 1: loss 2.5",
    ]


def test_rank_attempt_and_pattern(hires, run):
    words = ["logs", str(run), "--rank", "1", "--attempt", "0", "--grep", r"attempt \d"]
    assert hires(*words).out == "[1] 10:00:01.000 rank 1: attempt 0\n"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["nothing"], 2, "there is no run 'nothing'"),
        (["0123abcd", "--rank", "7"], 2, "rank 7 has no log in attempt 1; ranks 0 to 1 have one"),
        (["0123abcd", "--rank", "x"], 2, "invalid int value: 'x'"),
        (["0123abcd", "--attempt", "9"], 2, "has no attempt 9; there are 0 to 1"),
        (["0123abcd", "--grep", "("], 2, "is no regular expression"),
        ([], 2, "RUN"),
    ],
)
def test_mistakes_are_told_with_what_there_is(hires, run, words, code, told):
    answer = hires("logs", *words)
    assert answer.code == code
    assert told in answer.err


def test_run_that_was_never_begun(hires, tmp_path):
    make_run(tmp_path / "results")
    answer = hires("logs", "0123abcd")
    assert (answer.code, "has no attempt yet" in answer.err) == (2, True)


def follow(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hires", "logs", "0123abcd", "-f", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_following_goes_on_in_the_next_attempt_and_ends_with_the_run(run, tmp_path):
    process = follow(tmp_path, "--rank", "0")
    try:
        assert process.stdout is not None
        assert "attempt 1" in process.stdout.readline()
        end(run / "a1", "failed", cause="rank 1 was killed by SIGKILL")
        logs = begin(run, 2) / "logs"
        (logs / "rank0000.log").write_text("11:00:00.000 rank 0: again\n")
        while "again" not in process.stdout.readline():
            pass
        with (logs / "rank0000.log").open("a") as file:
            file.write("11:00:01.000 rank 0: the end\n")
        done(run, 2)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert out == "[0] 11:00:01.000 rank 0: the end\n"
    assert process.returncode == 0
    assert err.splitlines()[-1] == "attempt 2"


def test_interrupted_following_ends_without_a_word(run, tmp_path):
    process = follow(tmp_path)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        threading.Timer(0.3, process.send_signal, [signal.SIGINT]).start()
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")


def test_help_has_examples(hires, capsys):
    with pytest.raises(SystemExit):
        hires("logs", "--help")
    assert "--grep 'nan|inf'" in capsys.readouterr().out
