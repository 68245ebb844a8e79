"""Waiting for a job, depending on one, and refusing a run that a job or process may have."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from hires.core.errors import ConfigError, RunError
from hires.core.store import attempts, file_names, records
from hires.core.store.ends import End
from hires.core.store.files import append_line
from hires.launcher.interface import note_job
from hires.launcher.slurm import submission
from hires.launcher.slurm.submission import JobWait, dependency
from hires.launcher.status import running_elsewhere, state
from tests.helpers import run_folders
from tests.helpers.run_folders import done, make_run, submitted

FORGOTTEN = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
SILENT = 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1'


def job(state: str) -> str:
    return f"echo '7|N/A|{state}|N/A|None'"


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Sets what squeue does: a line of shell for each call, of which the last stays."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(submission, "QUERY_S", 0.05)
    monkeypatch.setattr(submission, "FILES_S", 0.01)
    monkeypatch.setattr(state, "AGAIN_S", 0.01)
    monkeypatch.setattr(state, "OLD_S", -1.0)  # a job that is not listed was listed before

    def script(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)

    def answers(*lines: str) -> None:
        cases = " ".join(f"{n}) {line} ;;" for n, line in enumerate(lines[:-1]))
        count = f"n=$(cat {folder}/calls 2>/dev/null || echo 0); echo $((n + 1)) > {folder}/calls"
        words = f'echo "$@" >> {folder}/words'
        script("squeue", f"{words}\n{count}\ncase $n in {cases} *) {lines[-1]} ;; esac")
        (folder / "calls").unlink(missing_ok=True)

    script("sacct", FORGOTTEN)  # it has forgotten the job, as squeue has
    answers.script = script
    answers.words = lambda: (folder / "words").read_text()
    return answers


@pytest.fixture
def run(fake_world):
    """A run whose first attempt is job 7."""
    made = fake_world("ok", "ok")
    note_job("slurm", made.attempt_dir, "7", None)
    return made


def end(run, attempt: int, state: str, reason: str | None = None) -> None:
    values = {"state": state, "cause": f"it is {state}", "reason": reason, "exit_codes": {"0": 1}}
    path = file_names.attempt_dir(run, attempt) / "exit.json"
    path.write_text(json.dumps(values))


def waited(run, after=None) -> tuple[End, list]:
    """Returns how job 7 ended, and the lines of its ranks; ``after`` happens a little later."""
    lines: list[dict[str, object]] = []
    if after is not None:
        threading.Timer(0.3, after).start()
    return JobWait(run, "7", lines.append).wait(), lines


def test_job_that_made_way_is_followed_until_slurm_says_that_it_is_over(run, squeue):
    squeue(job("PENDING"))
    end(run, 0, "failed", "timeout")

    def go_on() -> None:
        note_job("slurm", file_names.attempt_dir(run, attempts.next_attempt(run)), "7", None)
        append_line(Path(run) / "a1" / "metrics.jsonl", {"kind": "begin"})
        end(run, 1, "failed", "node")
        squeue(job("RUNNING"), job("FAILED"))

    outcome, lines = waited(run, go_on)
    assert (outcome.reason, lines) == ("node", [{"kind": "begin"}])


def test_job_that_is_cancelled_while_it_waits_to_go_on_is_cancelled(run, squeue):
    squeue(job("PENDING"), job("CANCELLED"))
    end(run, 0, "failed", "preempted")
    outcome, _ = waited(run)
    assert (outcome.state, outcome.reason) == ("cancelled", None)
    text = "job 7 was cancelled while it waited to go on; before that: it is failed"
    assert json.loads((run.attempt_dir / "exit.json").read_text())["cause"] == text


@pytest.mark.parametrize(
    ("last", "state", "reason"),
    [
        (job("FAILED"), "failed", "launch"),
        (job("COMPLETED"), "lost", None),
        (FORGOTTEN, "lost", None),
        (job("CANCELLED"), "cancelled", None),
    ],
)
def test_job_that_leaves_no_exit_json_has_the_end_that_slurm_tells(
    run, squeue, last, state, reason
):
    squeue(job("PENDING"), last)
    outcome, _ = waited(run)
    assert (outcome.state, outcome.reason) == (state, reason)
    path = run.attempt_dir / "exit.json"
    assert (f"does not see {run.path}" in str(outcome.cause)) == (
        state == "lost" or reason == "launch"
    )
    assert path.exists() == (state != "lost")  # no certain end, so none is written
    if path.exists():
        values = json.loads(path.read_text())
        assert (values["state"], values["reason"], values["exit_codes"]) == (state, reason, {})
        assert records.read_record(run)["state"] == state


@pytest.mark.parametrize(
    "answers",
    [
        (job("RUNNING"), "true", job("RUNNING")),
        ("true", job("PENDING"), "true", job("RUNNING")),
        (SILENT,),
    ],
)
def test_one_odd_answer_or_none_is_no_verdict(run, squeue, answers):
    squeue(*answers)
    assert waited(run, lambda: end(run, 0, "done"))[0].state == "done"


def begin(path: Path) -> None:
    """Begins an attempt, as far as no job or process has the run."""
    with running_elsewhere.exclusive_start(path):
        pass


def test_run_whose_job_may_live_is_refused(run, squeue, monkeypatch):
    for answer, text in (
        (job("PENDING"), r"job 7 has it as attempt a0 \(pending\).*`hires cancel /.*`"),
        (job("FAILED"), None),
        (FORGOTTEN, None),
        (SILENT, r"job 7 may have it as attempt a0, and .*controller"),
    ):
        squeue(answer)
        if text is None:
            begin(run.path)
        else:
            with pytest.raises(RunError, match=text):
                begin(run.path)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(run.path))
        with pytest.raises(RunError, match="squeue is not installed here"):
            begin(run.path)
    records.event(run.path, 0, "launch_started", pid=1, host="n1")
    squeue(FORGOTTEN)  # as that of another cluster
    monkeypatch.setattr(state, "OLD_S", 60.0)
    with pytest.raises(RunError, match=r"job 7 has it as attempt a0: its ranks run, though"):
        begin(run.path)
    # It ended and was queued again: it would run twice at once, by its old job and by the new one.
    end(run, 0, "failed", "preempted")
    squeue(job("PENDING"))
    with pytest.raises(RunError, match=r"job 7 has it as attempt a0 \(pending\)"):
        begin(run.path)
    attempts.next_attempt(run.path)  # hires cancels what is the latest, and no other
    with pytest.raises(RunError, match=r"job 7 has it as attempt a0 \(pending\).*`scancel 7`"):
        begin(run.path)
    squeue(job("FAILED"))
    old = time.time() - 60
    os.utime(run.path / "a1" / "env.json", (old, old))
    begin(run.path)


def test_dependency_names_jobs_that_may_still_be_done(tmp_path, squeue):
    squeue("case \"$*\" in *jobs=9*) ;; *) echo '7|1-2|PENDING|N/A|Priority' ;; esac")
    results = tmp_path / "results"
    assert dependency(["7", "7_2"], ["7_1"]) == "afterok:7,afterok:7_2,afterany:7_1"
    assert dependency([], []) is None
    for ok, whatever, text in (
        (["9"], [], "--after 9: Slurm lists no such job"),
        (["7_3"], [], "--after 7_3: Slurm lists no such job"),
        ([], ["9"], "--after-any 9: Slurm lists no such job"),
        (["nope"], [], "'nope' is no campaign and no run"),
    ):
        with pytest.raises(ConfigError, match=text):
            dependency(ok, whatever, results)
    runs = [make_run(results, f"resnet18-64x64-single-fp32-{number}") for number in range(4)]
    run_folders.begin(runs[0])
    done(runs[0])
    for index in (1, 2):
        submitted(runs[index], job="7", index=index)
    (runs[3] / "config.yaml").rename(tmp_path / "config.yaml")
    assert dependency(["default"], [], results) == "afterok:7_1:7_2"
    assert dependency([], ["default"], results) == "afterany:7_1:7_2"
    (tmp_path / "config.yaml").rename(runs[3] / "config.yaml")
    run_folders.begin(runs[3])
    run_folders.end(runs[3] / "a0", "failed")
    with pytest.raises(ConfigError, match=r"3 is not done and will not be.*hires retry default"):
        dependency(["default"], [], results)
    assert dependency([], ["default"], results) == "afterany:7_1:7_2"
