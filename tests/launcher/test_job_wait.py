"""Does whoever waits for a job learn how it ended, whatever Slurm says or does not say?"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from hires.core.errors import RunError
from hires.core.store import attempts, file_names, records
from hires.core.store.files import append_line
from hires.launcher import job_wait
from hires.launcher.interface import launcher_named
from hires.launcher.job_wait import JobWait
from hires.launcher.slurm.job_script import note_job
from hires.launcher.status import running_elsewhere

FORGOTTEN = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
PENDING = "echo '7|N/A|PENDING|N/A|Priority'"
RUNNING = "echo '7|N/A|RUNNING|N/A|None'"
FAILED = "echo '7|N/A|FAILED|N/A|NonZeroExitCode'"
SILENT = 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1'


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Sets what squeue does: a line of shell for each call, of which the last stays."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for name in ("scontrol", "sacct"):  # they know no more than squeue does
        (folder / name).write_text(f"#!/bin/sh\n{FORGOTTEN}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(job_wait, "QUERY_S", 0.05)
    monkeypatch.setattr(job_wait, "FILES_S", 0.01)

    def answers(*lines: str) -> None:
        cases = [f"{n}) {line} ;;" for n, line in enumerate(lines[:-1])]
        script = [
            "#!/bin/sh",
            f"n=$(cat {folder}/calls 2>/dev/null || echo 0)",
            f"echo $((n + 1)) > {folder}/calls",
            f"case $n in {' '.join(cases)} *) {lines[-1]} ;; esac",
        ]
        (folder / "squeue").write_text("\n".join(script) + "\n")
        (folder / "squeue").chmod(0o755)

    return answers


@pytest.fixture
def run(fake_world):
    """A run whose first attempt is job 7."""
    made = fake_world("ok", "ok")
    note_job(made.attempt_dir, "7", None)
    return made


def end(run, attempt: int, state: str, reason: str | None = None) -> None:
    values = {"state": state, "cause": f"it is {state}", "reason": reason, "exit_codes": {"0": 1}}
    path = file_names.attempt_dir(run, attempt) / "exit.json"
    path.write_text(json.dumps(values))


def later(what) -> None:
    threading.Timer(0.3, what).start()


def test_exit_of_the_attempt_is_the_end(run, squeue):
    squeue(RUNNING)
    lines: list[dict[str, object]] = []
    append_line(run.attempt_dir / "metrics.jsonl", {"kind": "step", "rank": 0})
    later(lambda: end(run, 0, "failed"))
    outcome = JobWait(launcher_named("slurm"), run, "7", lines.append).wait()
    assert (outcome.state, outcome.cause, outcome.exit_codes) == ("failed", "it is failed", {0: 1})
    assert lines == [{"kind": "step", "rank": 0}]


@pytest.mark.parametrize("reason", ["timeout", "preempted", "node"])
def test_job_that_starts_again_is_followed_into_its_next_attempt(run, squeue, reason):
    squeue(PENDING)
    end(run, 0, "failed", reason)
    lines: list[dict[str, object]] = []

    def go_on() -> None:
        note_job(file_names.attempt_dir(run, attempts.next_attempt(run)), "7", None)
        append_line(Path(run) / "a1" / "metrics.jsonl", {"kind": "begin"})
        end(run, 1, "done")

    later(go_on)
    outcome = JobWait(launcher_named("slurm"), run, "7", lines.append).wait()
    assert outcome.state == "done"
    assert lines == [{"kind": "begin"}]


def test_job_that_made_way_for_good_is_over_when_slurm_says_so(run, squeue):
    squeue(RUNNING, FAILED)
    end(run, 0, "failed", "timeout")
    assert JobWait(launcher_named("slurm"), run, "7").wait().reason == "timeout"


@pytest.mark.parametrize("last", [FAILED, FORGOTTEN, "true"])
def test_job_that_leaves_no_word_is_lost(run, squeue, last):
    squeue(PENDING, last)
    outcome = JobWait(launcher_named("slurm"), run, "7").wait()
    assert (outcome.state, outcome.exit_code) == ("lost", 1)
    assert f"its node does not see {run.path}" in outcome.cause


def test_job_that_was_cancelled_before_it_started_is_noted(run, squeue):
    squeue(PENDING, "echo '7|N/A|CANCELLED|N/A|None'")
    assert JobWait(launcher_named("slurm"), run, "7").wait().state == "cancelled"
    values = json.loads((run.attempt_dir / "exit.json").read_text())
    assert (values["state"], values["exit_codes"]) == ("cancelled", {})
    assert records.read_record(run)["state"] == "cancelled"


@pytest.mark.parametrize("odd", ["true", SILENT, FORGOTTEN])
def test_one_odd_answer_is_no_verdict(run, squeue, odd):
    squeue(RUNNING, odd, RUNNING)
    later(lambda: end(run, 0, "done"))
    assert JobWait(launcher_named("slurm"), run, "7").wait().state == "done"


def test_slurm_that_does_not_answer_is_no_verdict(run, squeue):
    squeue(SILENT)
    later(lambda: end(run, 0, "done"))
    assert JobWait(launcher_named("slurm"), run, "7").wait().state == "done"


def begin(path: Path) -> None:
    """Begins an attempt, as far as no job or process has the run."""
    with running_elsewhere.alone(path):
        pass


def test_run_whose_job_is_queued_is_refused(run, squeue):
    squeue(PENDING)
    with pytest.raises(
        RunError, match=r"job 7 has it as attempt a0 \(pending\).*`hires cancel /.*`"
    ):
        begin(run.path)
    attempts.next_attempt(run.path)  # hires cancels what is the latest, and no other
    with pytest.raises(RunError, match=r"job 7 has it as attempt a0 \(pending\).*`scancel 7`"):
        begin(run.path)


@pytest.mark.parametrize("answer", [FAILED, FORGOTTEN])
def test_run_whose_job_is_gone_may_be_submitted(run, squeue, answer):
    squeue(answer)
    begin(run.path)
    end(run, 0, "failed")
    squeue(RUNNING)  # of another job by now
    begin(run.path)
    begin(run.path / "none")


def test_run_whose_job_was_queued_again_is_refused(run, squeue):
    # It ended, and still would have run twice at once: by its old job and by the new one.
    end(run, 0, "failed", "preempted")
    squeue(PENDING)
    with pytest.raises(RunError, match=r"job 7 has it as attempt a0 \(pending\)"):
        begin(run.path)
    squeue(FAILED)
    begin(run.path)


@pytest.mark.parametrize(
    ("word", "reason"),
    [("NODE_FAIL", "node"), ("TIMEOUT", "timeout"), ("OUT_OF_MEMORY", "oom")],
)
def test_job_that_leaves_no_word_has_the_reason_that_slurm_tells(run, squeue, word, reason):
    squeue(RUNNING, f"echo '7|N/A|{word}|N/A|None'")
    outcome = JobWait(launcher_named("slurm"), run, "7").wait()
    assert (outcome.state, outcome.reason) == ("failed", reason)
    left = json.loads((run.attempt_dir / "exit.json").read_text())
    assert (left["state"], left["reason"]) == ("failed", reason)


def test_node_that_does_not_see_the_run_folder_is_the_cause(run, squeue, tmp_path):
    squeue(FAILED)
    (tmp_path / "commands" / "scontrol").write_text("#!/bin/sh\necho JobId=7 ExitCode=66:0\n")
    outcome = JobWait(launcher_named("slurm"), run, "7").wait()
    assert (outcome.state, outcome.reason) == ("failed", "launch")
    assert f"its node does not see {run.path}" in outcome.cause
    assert json.loads((run.attempt_dir / "exit.json").read_text())["reason"] == "launch"


def test_run_whose_job_may_live_is_refused_while_slurm_does_not_answer(run, squeue, monkeypatch):
    squeue(SILENT)
    with pytest.raises(RunError, match=r"job 7 may have it as attempt a0, and .*controller"):
        begin(run.path)
    monkeypatch.setenv("PATH", str(run.path))
    with pytest.raises(RunError, match="squeue is not installed here"):
        begin(run.path)
