"""``hires status`` and ``hires logs`` tell how runs are doing and what their ranks said, end by
themselves, and end without a word on Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hires.cli.verbs import verb_status
from hires.cli.verbs.verb_logs import RankLogs
from hires.core.store import campaign
from hires.core.store.campaign import Campaign, ExcludedPoint, PlannedPoint
from hires.launcher.status import state
from tests.helpers.commands import REPOSITORY
from tests.helpers.patience import PATIENCE_S
from tests.helpers.run_folders import begin, done, end, make_run, steps


def test_every_point_has_a_line_with_its_state_and_numbers(hires, tmp_path, monkeypatch):
    monkeypatch.setattr(state, "AGAIN_S", 0.01)
    results = tmp_path / "results"
    begin(make_run(results, "one-00000001"))
    done(results / "default/one-00000001")
    steps(begin(make_run(results, "two-00000002")), 42)
    three = begin(make_run(results, "three-00000003"))
    end(three, "failed", reason="nan", cause="the loss is\nnan")
    make_run(results, "four-00000004")
    points = [PlannedPoint(name, []) for name in ("one-00000001", "five-00000005")]
    excluded = [ExcludedPoint(["image=9", "batch=1"], "batch=1 does not divide")]
    excluded.append(ExcludedPoint(["image=8"], "no module net", "failed"))
    campaign.write(results / "default", Campaign("default", [], points, excluded))
    answer = hires("status")
    assert (answer.code, answer.err) == (0, "")
    rows = {line.split()[0]: line for line in answer.out.splitlines() if line}
    assert rows["one-00000001"].split()[2:] == ["done", "100/100", "-", "41.5", "1.5", "GiB", "a0"]
    # 58 steps of half a second are left.
    assert rows["two-00000002"].split()[1:5] == ["default", "running", "42/100", "29"]
    assert rows["two-00000002"].split()[5:] == ["s", "16", "512.0", "MiB", "a0"]
    for name, text in (
        ("three-00000003", "failed (nan)"),
        ("three-00000003", "the loss is nan"),
        ("four-00000004", "pending"),
        ("five-00000005", "planned, and not begun"),
        ("image=9", "infeasible"),
    ):
        assert text in rows[name]
    last = answer.out.splitlines()[-1]
    assert last == "7 runs: 1 done, 2 failed, 1 infeasible, 2 pending, 1 running"
    assert len(hires("status", "default").out.splitlines()) == 10
    one = hires("status", "00000002").out
    assert ("two-00000002" in one, len(one.splitlines())) == (True, 3)
    for name, text in (
        ("defualt", "is no campaign and no run: the campaigns under results/ are default"),
        ("0000000", "may be any of 4 runs"),
    ):
        answer = hires("status", name)
        assert (answer.code, text in answer.err) == (2, True)


def test_watching_goes_on_while_runs_wait(hires, tmp_path, monkeypatch):
    make_run(tmp_path / "results", "one-00000001")

    def sleep(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(verb_status.time, "sleep", sleep)
    assert hires("status", "--watch").code == 130  # it looks again
    for words in (("status", "--watch"), ("logs", "one-00000001", "--follow")):
        answer = hires(*words, "--json")  # objects were printed one after the other
        assert (answer.code, json.loads(answer.out)["error"]["exit_code"]) == (2, 2)


def following(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hires", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize("words", [("status", "--watch"), ("logs", "0123abcd", "-f")])
def test_interrupted_watching_ends_without_a_word(tmp_path, words):
    logs = begin(make_run(tmp_path / "results")) / "logs"
    (logs / "rank0000.log").write_text("2026-01-31T10:00:00.000Z rank 0: begins\n")
    process = following(tmp_path, *words)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        threading.Timer(0.2, process.send_signal, [signal.SIGINT]).start()
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """A run of two attempts, whose ranks wrote logs; one of the last lines is not complete."""
    folder = make_run(tmp_path / "results")
    for attempt in range(2):
        logs = begin(folder, attempt) / "logs"
        (logs / "rank0000.log").write_text(
            "a warning of torch\n"
            f"2026-01-31T10:00:00.100Z rank 0: attempt {attempt}\n"
            "2026-01-31T10:00:02.000Z rank 0 error: rank failed\n"
            "Traceback (most recent call last):\n"
            "ValueError: x\n"
        )
        text = "2026-01-31T10:00:01.000Z rank 1: waits\n2026-01-31T10:00:02.000Z rank 1: too"
        (logs / "rank0001.log").write_text(text)
    return folder


def test_logs_are_merged_by_time_and_tracebacks_stay_whole(hires, logged):
    assert hires("logs", "0123abcd").out.splitlines() == [
        "[0] a warning of torch",
        "[0] 2026-01-31T10:00:00.100Z rank 0: attempt 1",
        "[1] 2026-01-31T10:00:01.000Z rank 1: waits",
        "[0] 2026-01-31T10:00:02.000Z rank 0 error: rank failed",
        "[0] Traceback (most recent call last):",
        "[0] ValueError: x",
        "[1] 2026-01-31T10:00:02.000Z rank 1: too",
    ]
    words = ["logs", str(logged), "--rank", "0", "--attempt", "0", "--grep", r"attempt \d"]
    assert hires(*words).out == "[0] 2026-01-31T10:00:00.100Z rank 0: attempt 0\n"
    make_run(logged.parents[1], "resnet18-64x64-single-fp32-4567cdef")
    for words, text in (
        (["0123abcd", "--rank", "7"], "rank 7 has no log in attempt 1; ranks 0 to 1 have one"),
        (["0123abcd", "--attempt", "9"], "has no attempt 9; there are 0 to 1"),
        (["0123abcd", "--grep", "("], "is no regular expression"),
        (["4567cdef"], "has no attempt yet"),
    ):
        answer = hires("logs", *words)
        assert (answer.code, text in answer.err) == (2, True)


def test_following_goes_on_in_the_next_attempt_and_ends_with_the_run(logged, tmp_path):
    process = following(tmp_path, "logs", "0123abcd", "-f", "--rank", "0", "--grep", "rank 0:")
    try:
        assert process.stdout is not None
        assert "attempt 1" in process.stdout.readline()
        end(logged / "a1", "failed", cause="rank 1 was killed by SIGKILL")
        for number in (2, 3):  # both, before they are looked at
            log = begin(logged, number) / "logs" / "rank0000.log"
            log.write_text(f"2026-01-31T11:00:00.000Z rank 0: attempt {number}\n")
        end(logged / "a2", "failed", cause="rank 1 was killed by SIGKILL")
        lines = [""]
        while "attempt 3" not in lines[-1]:
            lines.append(process.stdout.readline())
        assert any("attempt 2" in line for line in lines)
        with log.open("a") as file:
            file.write("2026-01-31T11:00:01.000Z rank 0: the end\n")
        done(logged, 3)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert out == "[0] 2026-01-31T11:00:01.000Z rank 0: the end\n"
    assert (process.returncode, err.splitlines()[-1]) == (0, "attempt 3")


def test_day_decides_before_the_hour(tmp_path):
    logs = tmp_path / "a0" / "logs"
    logs.mkdir(parents=True)
    days = "2026-01-31T23:59:59", "2026-02-01T00:00:00"
    (logs / "rank0000.log").write_text(f"{days[0]}.900Z rank 0: a\n{days[1]}.200Z rank 0: c\n")
    (logs / "rank0001.log").write_text(f"{days[1]}.100Z rank 1: b\n{days[1]}.300Z rank 1: d\n")
    entries = RankLogs(tmp_path).read(0, to_end=True)
    assert "".join(text[-1] for _, _, texts in entries for text in texts) == "abcd"
