"""Do index and folders say the same, and do folders fill what the index lacks?"""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest

from hires.core.store import run_index
from hires.report.read.rows import run_row
from hires.report.read.runs import read_run, rebuild_index, runs_of
from hires.report.tables import done_records
from tests.helpers.compared_runs import compared_run, failed_run

STEPS = [0.5, 0.6, 0.7]


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


@pytest.fixture
def paths(results):
    runs = [compared_run(results, [STEPS, STEPS], campaign=name) for name in ("a", "b")]
    return [*runs, failed_run(results, campaign="c")]


def rows(results, paths):
    runs, notes = runs_of(results, paths)
    return [run_row(run) for run in runs], [note.text for note in notes]


def test_record_that_may_not_be_looked_at_is_missing(results, paths, monkeypatch):
    """Path.exists raises where a folder may not be searched; this test may run as root."""

    def refused(real):
        def look(path, *args, **keys):
            if str(path).endswith("record.json"):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return real(path, *args, **keys)

        return look

    for name in ("open", "stat", "lstat"):
        monkeypatch.setattr(os, name, refused(getattr(os, name)))
    run = read_run(paths[0])
    assert run.record == {}
    assert "Permission denied" in [note.text for note in run.notes]


def test_index_says_what_the_folders_say(results, paths):
    read, notes = rows(results, paths)
    assert "3 runs that have ended are not in the index" in notes[-1]
    assert rebuild_index(results, paths) == (5, [])
    for path in paths:  # so that nothing can be read there
        for file in (*path.glob("a*/*.json"), path / "config.yaml", path / "record.json"):
            file.unlink()
    assert rows(results, paths) == (read, [])


def test_torn_index_costs_one_look_into_a_folder(results, paths):
    read, _ = rows(results, paths)
    rebuild_index(results, paths)
    text = (results / run_index.FILE).read_text()
    (results / run_index.FILE).write_text(text[:-100])
    again, notes = rows(results, paths)
    assert again == read
    assert notes[0] == "1 torn line left out"
    assert notes[1].startswith("1 run that has ended is not in the index")


@pytest.mark.parametrize(
    "text", ["", "\0\1\2", "[]\n7\nnull\n", '{"schema": 1, "attempt": []}\n', "{" * 5000]
)
def test_damaged_index_is_as_none(results, paths, text):
    read, _ = rows(results, paths)
    (results / run_index.FILE).write_text(text)
    assert rows(results, paths)[0] == read


def test_line_of_a_newer_hires_or_with_nonsense_is_not_used(results, paths):
    read, _ = rows(results, paths)
    rebuild_index(results, paths)
    lines = [json.loads(line) for line in (results / run_index.FILE).read_text().splitlines()]
    for line, change in zip(
        lines, ({"schema": 99}, {"config": 3}, {"exit": []}, {"record": "x"}, {}), strict=True
    ):
        line |= change
    (results / run_index.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, _ = rows(results, paths)
    assert found[0] == read[0]
    assert found[2] == read[2]


def test_attempt_since_then_sends_to_the_folder(results, paths):
    rebuild_index(results, paths)
    (paths[0] / "a2").mkdir()
    assert rows(results, paths)[1] == []  # it has not ended: nothing is missing in the index
    (paths[0] / "a2" / "exit.json").write_text('{"state": "failed", "cause": "x"}')
    again, notes = rows(results, paths)
    assert notes[0].startswith("1 run that has ended")
    assert again[0]["state"] == "done"  # an earlier attempt completed it


@pytest.mark.parametrize("file", ["a1/record.json", "record.json", "a1/exit.json", "config.yaml"])
def test_file_that_was_damaged_since_is_named(results, paths, file):
    rebuild_index(results, paths)
    (paths[0] / file).write_text("[")
    for _ in range(2):  # the new index has no line that would hide it
        runs, notes = runs_of(results, paths)
        assert any(note.where.endswith(file) for note in runs[0].notes)
        assert not runs[1].notes + runs[2].notes + notes
        rebuild_index(results, paths)


def test_runs_that_are_gone_are_not_listed(results, paths):
    rebuild_index(results, paths)
    assert len(runs_of(results, paths[:1])[0]) == 1
    for path in paths[1:]:
        shutil.rmtree(path)
    assert rebuild_index(results, paths[:1])[0] == 2
    assert len((results / run_index.FILE).read_text().splitlines()) == 2


def test_old_run_without_a_record_of_its_attempt_has_one_complete_attempt(results):
    path = compared_run(results, [STEPS])
    (path / "a0" / "record.json").unlink()
    record = json.loads((path / "record.json").read_text())
    del record["attempt"]
    (path / "record.json").write_text(json.dumps(record))
    [attempt] = read_run(path).complete
    assert (attempt.number, attempt.record) == (0, record)
    assert [one["throughput"] for one in done_records(path, 1)] == [record["throughput"]]
    rebuild_index(results, [path])
    [line] = (results / run_index.FILE).read_text().splitlines()
    assert json.loads(line)["record"]["state"] == "done"
