"""Are the logs of several ranks one story in the order of time?"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from hires.cli.verbs.verb_logs import RankLogs
from hires.core.errors import RunError
from hires.launcher.status import run_progress
from hires.launcher.status.run_progress import (
    MAX_LINE,
    FileTail,
    MetricsTail,
    ProgressEnds,
    read_ends,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    logs = tmp_path / "a0" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank0000.log").write_text(
        "a warning of torch\n"
        "10:00:00.100 rank 0: begins\n"
        "10:00:02.000 rank 0 error: rank failed\n"
        "Traceback (most recent call last):\n"
        "ValueError: x\n"
    )
    (logs / "rank0001.log").write_text("10:00:01.000 rank 1: waits\n10:00:02.000 rank 1: too")
    (logs / "launcher.log").write_text("10:00:00.000 hires: no rank\n")
    return tmp_path


def told(entries) -> list[str]:
    return [f"{rank} {text}" for _, rank, lines in entries for text in lines]


def test_entries_of_all_ranks_are_merged_by_time_and_tracebacks_stay_whole(run):
    assert told(RankLogs(run).read(0, to_end=True)) == [
        "0 a warning of torch",
        "0 10:00:00.100 rank 0: begins",
        "1 10:00:01.000 rank 1: waits",
        "0 10:00:02.000 rank 0 error: rank failed",
        "0 Traceback (most recent call last):",
        "0 ValueError: x",
        "1 10:00:02.000 rank 1: too",
    ]


def test_midnight_does_not_turn_the_order(tmp_path):
    logs = tmp_path / "a0" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank0000.log").write_text("23:59:59.900 rank 0: a\n00:00:00.200 rank 0: c\n")
    (logs / "rank0001.log").write_text("23:59:59.950 rank 1: b\n00:00:00.300 rank 1: d\n")
    assert [line[-1] for line in told(RankLogs(tmp_path).read(0, to_end=True))] == [
        "a",
        "b",
        "c",
        "d",
    ]


def test_follower_tells_what_was_added_and_waits_for_the_end_of_a_line(run):
    logs = RankLogs(run)
    assert len(told(logs.read(0))) == 6
    assert list(logs.read(0)) == []
    with (run / "a0/logs/rank0001.log").open("a") as file:
        file.write(" late\n")
    (run / "a0/logs/rank0002.log").write_text("10:00:03.000 rank 2: new\n")
    assert told(logs.read(0)) == [
        "1 10:00:02.000 rank 1: too late",
        "2 10:00:03.000 rank 2: new",
    ]


def test_bytes_that_are_no_text_are_no_crash(run):
    (run / "a0/logs/rank0000.log").write_bytes(b"\xff\xfe\n")
    assert told(RankLogs(run).read(0, to_end=True))[0].startswith("0 \N{REPLACEMENT CHARACTER}")


def test_attempt_without_logs_has_none(tmp_path):
    assert list(RankLogs(tmp_path).read(7)) == []


def test_pipe_in_place_of_a_log_or_of_metrics_is_not_waited_for(tmp_path):
    (tmp_path / "a0" / "logs").mkdir(parents=True)
    for name in ("a0/logs/rank0000.log", "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    assert list(RankLogs(tmp_path).read(0, to_end=True)) == []
    assert MetricsTail(tmp_path / "metrics.jsonl").read() == []
    assert read_ends(tmp_path / "metrics.jsonl", 1) == ProgressEnds()


@pytest.mark.parametrize("to_end", [True, False])
def test_logs_of_more_ranks_than_a_process_may_open_are_all_read(tmp_path, to_end):
    logs = tmp_path / "a0" / "logs"
    logs.mkdir(parents=True)
    for rank in range(200):
        (logs / f"rank{rank:04d}.log").write_text("10:00:00.000 b\n10:00:00.000 a\n")
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 20, hard))
    try:
        shown = told(RankLogs(tmp_path).read(0, to_end))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert shown == [f"{rank} 10:00:00.000 {word}" for rank in range(200) for word in "ba"]


def test_log_that_cannot_be_opened_for_want_of_files_is_an_error(run, monkeypatch):
    def too_many(path):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(run_progress, "open_regular", too_many)
    with pytest.raises(RunError, match="Too many open files"):
        list(RankLogs(run).read(0, to_end=True))
    assert list(RankLogs(run).read(0)) == []


def test_logs_of_earlier_attempts_are_forgotten(run):
    logs = RankLogs(run)
    assert list(logs.read(0))
    (run / "a1" / "logs").mkdir(parents=True)
    with (run / "a0/logs/rank0000.log").open("a") as file:
        file.write("10:00:09.000 late\n")
    assert list(logs.read(1)) == []


def test_line_that_is_too_long_is_shown_in_part_and_the_next_is_whole(tmp_path):
    """A log without line breaks of 1 GiB was read into memory as one line."""
    log = tmp_path / "rank0000.log"
    with log.open("wb") as file:
        file.write(b"first\n")
        file.truncate(3 * MAX_LINE)
    tail = FileTail(log)
    first, cut = tail.lines()
    assert (first, len(cut)) == (b"first\n", MAX_LINE)
    with log.open("ab") as file:
        file.write(b"end of it\nnext\n")
    assert list(tail.lines()) == [b"next\n"]
    assert list(tail.lines()) == []
