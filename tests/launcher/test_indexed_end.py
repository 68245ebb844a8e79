"""Does the end of a run add its line to the index, and never hang or fail because of it?"""

from __future__ import annotations

import json
import shutil

from hires.core.store import run_index, rundir
from hires.core.store.run_index import write_exit
from hires.launcher.local import local_launcher


def lines(run):
    text = (run.path.parent.parent / run_index.FILE).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_done_and_failed_attempts_have_a_line_each(fake_world, launch):
    launch(fake_world("ok", "ok"))
    run = fake_world("ok", "ok")
    launch(run)
    launch(fake_world("raise", steps=4))
    done, again, failed = lines(run)
    assert (done["campaign"], done["run"], done["attempt"]) == ("default", run.name, 0)
    assert (again["attempt"], again["exit"]["state"]) == (1, "done")
    assert done["record"]["throughput"]["samples"] == 2
    assert done["config"]["steps"] == 3
    assert failed["exit"]["state"] == "failed"
    assert "told to fail" in failed["exit"]["cause"]
    assert failed["exit"]["ended"] > done["exit"]["ended"]


def test_attempt_whose_ranks_never_started_has_one_too(fake_world):
    run = fake_world("ok")
    local_launcher.leave(run, 0, "cancelled", "nobody wanted it")
    assert lines(run)[0]["exit"]["state"] == "cancelled"


def test_index_that_cannot_be_written_changes_no_end(fake_world, launch, caplog):
    run = fake_world("ok")
    (run.path.parent.parent / run_index.FILE).mkdir()
    assert launch(run).state == "done"
    assert "index.jsonl" in caplog.text


def test_folder_that_was_copied_writes_nothing_beside_it(fake_world, launch, tmp_path):
    run = fake_world("ok")
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(run.path, copy)
    assert launch(rundir.RunDir(copy, 0)).state == "done"
    assert not list(tmp_path.glob("**/index.jsonl"))


def test_end_that_the_queue_or_cancel_writes_has_a_line_too(fake_world):
    run = fake_world("ok")
    (run.attempt_dir / "record.json").write_text('{"state": "done", "loss": {"last": 2.0}}')
    write_exit(run.path, 0, {}, {"state": "lost", "cause": "its launcher was killed"})
    [line] = lines(run)
    assert (line["exit"]["state"], line["record"]["loss"]) == ("lost", {"last": 2.0})


def test_attempt_that_measured_nothing_has_none(fake_world):
    run = fake_world("ok")
    write_exit(run.path, 0, None, {"state": "done", "cause": None})
    assert (run.attempt_dir / "exit.json").exists()
    assert not list(run.path.parents[1].glob("index.jsonl"))
