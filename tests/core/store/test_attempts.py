"""Tests of what an attempt says of itself, whatever lies in its folder."""

from __future__ import annotations

import json
import os

import pytest

from hires.core.errors import RunError
from hires.core.store import attempts, file_names
from hires.core.store.attempts import Attempt


@pytest.fixture
def run(tmp_path):
    (tmp_path / "a0").mkdir()
    return tmp_path


def test_only_folders_that_hires_makes_count_as_attempts(run):
    for name in ("a10", "a2", "a01", "a", "b3", "a-1", "a1.tmp", "a" + "9" * 200):
        (run / name).mkdir()
    assert file_names.attempt_numbers(run) == [0, 2, 10]
    assert attempts.latest(run).number == 10
    assert file_names.attempt_numbers(run / "missing") == []
    assert attempts.latest(run / "missing") is None


def test_files_that_are_missing_are_empty_and_no_fault(run):
    attempt = Attempt(run, 0, strict=True)
    files = (attempt.exit, attempt.job, attempt.env, attempt.record, attempt.launched)
    assert files == ({}, {}, {}, {}, {})
    assert attempt.events == attempt.metrics == []
    assert not attempt.has_ended
    assert not attempt.is_cancelled


@pytest.mark.parametrize("name", ["exit", "job", "env", "record"])
@pytest.mark.parametrize("kind", ["torn", "infinity", "deep", "pipe", "folder", "huge"])
def test_nothing_in_place_of_a_file_hangs_or_ends_a_reader(run, name, kind):
    file = run / "a0" / f"{name}.json"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "huge":
        with file.open("wb") as opened:
            opened.truncate(10 * 2**30)
    else:
        text = {"torn": '{"a"', "infinity": "Infinity", "deep": '{"a":' * 10**5}[kind]
        file.write_text(text)
    attempt = Attempt(run, 0)
    assert getattr(attempt, name) == {}
    assert [note.where.endswith(f"a0/{name}.json") for note in attempt.notes] == [True]
    with pytest.raises(RunError, match=f"{name}.json"):
        getattr(Attempt(run, 0, strict=True), name)


@pytest.mark.parametrize("name", ["events", "metrics"])
def test_pipe_in_place_of_lines_is_not_waited_for(run, name):
    os.mkfifo(run / "a0" / f"{name}.jsonl")
    attempt = Attempt(run, 0)
    assert getattr(attempt, name) == []
    assert attempt.launched == {}
    assert attempt.notes


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("exit", {"state": 3}),
        ("exit", {"state": "failed", "cause": ["x"]}),
        ("job", {}),
        ("job", {"job": "7; rm"}),
        ("job", {"job": "7", "pack": float("inf")}),
    ],
)
def test_values_of_another_type_are_damage(run, name, values):
    (run / "a0" / f"{name}.json").write_text(json.dumps(values))
    attempt = Attempt(run, 0)
    assert getattr(attempt, name) == {}
    assert attempt.damaged == (f"a0/{name}.json",)


def test_copy_of_a_record_that_differs_from_the_run_s_is_read(run):
    for folder in (run, run / "a0"):
        (folder / "record.json").write_text("[}")  # equal: then the run's own is named
    assert Attempt(run, 0).damaged == ()
    (run / "record.json").write_text('{"state": "done"}')
    assert Attempt(run, 0).damaged == ("a0/record.json",)
    (run / "a0" / "record.json").write_text('{"state": "failed"}')
    assert Attempt(run, 0).damaged == ()
    for path in (run / "record.json", run / "a0" / "record.json"):
        path.unlink()
        os.mkfifo(path)
    assert Attempt(run, 0).damaged == ("a0/record.json",)


def test_an_attempt_is_a_snapshot(run):
    attempt = Attempt(run, 0)
    assert attempt.exit == {}
    (run / "a0" / "exit.json").write_text('{"state": "done"}')
    assert attempt.exit == {}
    assert attempt.has_ended
    assert Attempt(run, 0).exit == {"state": "done"}


def test_what_is_held_is_not_read(run):
    (run / "a0" / "exit.json").write_text("{")
    attempt = Attempt(run, 0, held={"exit": {"state": "done"}})
    assert attempt.exit == {"state": "done"}
    assert attempt.notes == []


def test_job_of_before_there_were_several_launchers_is_one_of_slurm(run):
    (run / "a0").mkdir(parents=True, exist_ok=True)
    (run / "a0" / "job.json").write_text('{"job": "12", "index": null}')
    assert Attempt(run, 0).job == {"launcher": "slurm", "job": "12", "index": None, "pack": 1}


def test_the_last_start_counts(run):
    lines = [{"event": "launch_started", "pid": 1}, {"event": "other"}]
    lines += [{"event": "launch_started", "pid": 2}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "a0" / "events.jsonl").write_text(text + '{"event": "launch_started", "pid"')
    assert Attempt(run, 0).launched["pid"] == 2
