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
from hires.core.store.files import append_line
from hires.launcher import job_wait
from hires.launcher.interface import launcher_named
from hires.launcher.job_wait import JobWait
from hires.launcher.local import local_launcher
from hires.launcher.slurm import job_arrays
from hires.launcher.slurm.job_script import dependency, note_job
from hires.launcher.status import running_elsewhere, state
from tests.helpers import run_folders
from tests.helpers.run_folders import done, make_run, submitted

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


def waited(run, lines: list | None = None):
    """Returns how job 7 ended."""
    on_line = None if lines is None else lines.append
    return JobWait(launcher_named("slurm"), run, "7", on_line).wait()


@pytest.mark.parametrize("reason", ["timeout", "node"])
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


@pytest.mark.parametrize(
    ("last", "state", "reason"),
    [
        (FAILED, "lost", None),
        (FORGOTTEN, "lost", None),
        ("echo '7|N/A|CANCELLED|N/A|None'", "cancelled", None),
        ("echo '7|N/A|NODE_FAIL|N/A|None'", "failed", "node"),
        ("echo '7|N/A|TIMEOUT|N/A|None'", "failed", "timeout"),
    ],
)
def test_job_that_leaves_no_exit_json_has_the_end_that_slurm_tells(
    run, squeue, last, state, reason
):
    squeue(PENDING, last)
    outcome = waited(run)
    assert (outcome.state, outcome.reason) == (state, reason)
    path = run.attempt_dir / "exit.json"
    if state == "lost":  # no certain end, so none is written
        assert f"its node does not see {run.path}" in outcome.cause
        assert not path.exists()
    else:
        values = json.loads(path.read_text())
        assert (values["state"], values["reason"], values["exit_codes"]) == (state, reason, {})
        assert records.read_record(run)["state"] == state


@pytest.mark.parametrize("answers", [(RUNNING, "true", RUNNING), (SILENT,)])
def test_one_odd_answer_or_none_is_no_verdict(run, squeue, answers):
    squeue(*answers)
    later(lambda: end(run, 0, "done"))
    assert waited(run).state == "done"


def test_node_that_does_not_see_the_run_folder_is_the_cause(run, squeue, tmp_path):
    squeue(FAILED)
    (tmp_path / "commands" / "scontrol").write_text("#!/bin/sh\necho JobId=7 ExitCode=66:0\n")
    outcome = JobWait(launcher_named("slurm"), run, "7").wait()
    assert (outcome.state, outcome.reason) == ("failed", "launch")
    assert f"its node does not see {run.path}" in outcome.cause
    assert json.loads((run.attempt_dir / "exit.json").read_text())["reason"] == "launch"


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


def test_run_whose_job_is_gone_may_be_submitted(run, squeue):
    for answer in (FAILED, FORGOTTEN):
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


def test_run_whose_job_may_live_is_refused_while_slurm_does_not_answer(run, squeue, monkeypatch):
    squeue(SILENT)
    with pytest.raises(RunError, match=r"job 7 may have it as attempt a0, and .*controller"):
        begin(run.path)
    monkeypatch.setenv("PATH", str(run.path))
    with pytest.raises(RunError, match="squeue is not installed here"):
        begin(run.path)


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """Returns a function that sets the queue: job, index and command in each line."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def lists(*lines: str, code: int = 0) -> None:
        (folder / "queue").write_text("".join(f"{line}\n" for line in lines))
        script = f'#!/bin/sh\necho "$@" >> {folder}/words\ncat {folder}/queue\nexit {code}\n'
        (folder / "squeue").write_text(script)
        (folder / "squeue").chmod(0o755)

    lists.words = lambda: (folder / "words").read_text() if (folder / "words").exists() else ""
    return lists


@pytest.fixture
def failed(fake_world):
    """A run whose submission was given up."""
    made = fake_world("ok")
    (made.path / file_names.JOB_SCRIPT).touch()
    local_launcher.leave(made.path, 0, "failed", "sbatch did not answer within 120 s")
    return made.path


def test_run_whose_submission_went_through_unheard_is_not_submitted_again(failed, queue):
    said = r"job 9 has it, though its submission was not answered in time; .*`scancel 9`"
    for word in ("", " 0"):
        queue("5|N/A|/elsewhere/job.sbatch 0", f"9|N/A|{failed}/job.sbatch{word}")
        with pytest.raises(RunError, match=said), running_elsewhere.alone(failed):
            pass
    (failed / "a0" / "exit.json").unlink()  # the command was killed meanwhile
    old = time.time() - 60
    os.utime(failed / "a0" / "env.json", (old, old))
    [why] = running_elsewhere.holders([failed]).values()
    assert "job 9 has it" in why


def test_run_that_is_not_in_the_queue_may_be_submitted(failed, queue):
    for code in (0, 1):
        queue("5|N/A|/elsewhere/job.sbatch 0", code=code)
        assert running_elsewhere.holders([failed]) == {}
    assert f"--user={os.getuid()}" in queue.words()


def array(runs: list[Path], number: int = 0) -> Path:
    """Makes the folder of an array whose job nobody knows; returns its script."""
    folder = runs[0].parent / job_arrays.FOLDER / str(number)
    folder.mkdir(parents=True)
    lines = [json.dumps({"run": run.name, "attempt": 0}) for run in runs]
    (folder / file_names.POINTS).write_text("".join(f"{line}\n" for line in lines))
    return folder / file_names.JOB_SCRIPT


def test_elements_of_an_array_that_was_submitted_unheard_are_known_by_its_list(tmp_path, queue):
    runs = [make_run(tmp_path, f"run-{number}") for number in range(4)]
    for run in runs:
        (run / "a0").mkdir()
        run_folders.end(run / "a0", "failed", reason="launch")
    script = array(runs)
    submitted(runs[3])  # its number is known by now
    attempts.next_attempt(runs[2])  # something else was tried since
    queue(f"9|[0,2-3]|{script}", f"9|1|{script}", code=0)
    held = running_elsewhere.holders(runs)
    jobs = {run.name: text.split(" has it, though")[0] for run, text in held.items()}
    jobs.pop("run-2")  # the attempt that was tried since was just made
    assert jobs == {"run-0": "job 9_0", "run-1": "job 9_1"}


RUN = "resnet18-64x64-single-fp32-"


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """Elements 1 and 2 of array 7 wait; nothing else is known to Slurm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tools = {
        "squeue": "echo '7|1-2|PENDING|N/A|Priority'",
        "sacct": "exit 1",
        "scontrol": "echo Invalid job id specified >&2; exit 1",
    }
    for name, text in tools.items():
        test = 'case "$*" in *jobs=9*) exit ;; esac;' if name == "squeue" else ""
        (folder / name).write_text(f"#!/bin/sh\n{test} {text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(state, "AGAIN_S", 0.01)
    return tmp_path / "results"


def begun(results: Path, number: int) -> Path:
    """Returns a run that was begun on this machine."""
    run = make_run(results, f"{RUN}{number}")
    run_folders.begin(run)
    return run


def test_job_is_waited_for_by_its_number(results):
    assert dependency(["7", "7_2"], ["7_1"]) == "afterok:7,afterok:7_2,afterany:7_1"
    assert dependency([], []) is None


def test_job_that_slurm_does_not_know_is_refused(results):
    for name in ("9", "9_1", "7_3"):
        with pytest.raises(ConfigError, match=f"--after {name}: Slurm lists no such job"):
            dependency([name], [])
    with pytest.raises(ConfigError, match="--after-any 9: Slurm lists no such job"):
        dependency([], ["9"])
    with pytest.raises(ConfigError, match="'nope' is no campaign and no run"):
        dependency(["nope"], [], results)


def test_campaign_is_waited_for_as_far_as_it_has_not_ended(results):
    done(begun(results, 0))
    assert dependency(["default"], ["default"], results) is None
    for index in (1, 2):
        submitted(make_run(results, f"{RUN}{index}"), job="7", index=index)
    assert dependency(["default"], [], results) == "afterok:7_1:7_2"
    assert dependency([], ["default"], results) == "afterany:7_1:7_2"


def test_campaign_with_a_failed_run_will_never_be_done(results):
    run_folders.end(begun(results, 0) / "a0", "failed")
    with pytest.raises(ConfigError, match=r"0 is not done and will not be.*hires retry default"):
        dependency(["default"], [], results)
    assert dependency([], ["default"], results) is None
