"""Are the words of Slurm's tools understood? Fake tools stand for them: a real one is elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hires.core.errors import RunError
from hires.launcher.interface import JobStatus
from hires.launcher.slurm import scheduler
from hires.launcher.slurm.scheduler import cancel, job_states

ENDED = JobStatus("ended", "CANCELLED")
JOBS = [{"job": "12", "index": None}, {"job": "13", "index": 4}]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that makes a tool, and one that tells with which words it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, out: str = "", err: str = "", code: int = 0) -> None:
        (folder / f"{name}.out").write_text(out)
        (folder / f"{name}.err").write_text(err)
        tool = folder / name
        tool.write_text(
            f"#!/bin/sh\n"
            f'for word; do printf "%s\\n" "$word"; done >> {folder}/{name}.words\n'
            f"echo $SLURM_BITSTR_LEN > {folder}/{name}.letters\n"
            f"cat {folder}/{name}.out; cat {folder}/{name}.err >&2; exit {code}\n"
        )
        tool.chmod(0o755)

    make.letters = lambda name: (folder / f"{name}.letters").read_text()
    make.words = lambda name: (folder / f"{name}.words").read_text().splitlines()
    return make


def test_waiting_and_running_jobs(slurm):
    slurm(
        "squeue",
        "12|N/A|PENDING|2031-02-03T04:05:06|Resources\n13|4|RUNNING|2031-01-01T00:00:00|None\n",
    )
    assert job_states(JOBS) == {
        "12": JobStatus("pending", "Resources", "2031-02-03T04:05:06"),
        "13_4": JobStatus("running"),
    }
    assert "--jobs=12,13" in slurm.words("squeue")


def test_reason_may_hold_bars_and_an_unknown_start_is_none(slurm):
    slurm("squeue", "12|N/A|PENDING|N/A|(Nodes required | are DOWN)\n")
    assert job_states(JOBS[:1])["12"] == JobStatus("pending", "(Nodes required | are DOWN)")


def test_job_that_squeue_has_forgotten_is_found_in_the_accounts(slurm):
    slurm("squeue", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    slurm("sacct", "12|TIMEOUT|None\n13_4|CANCELLED by 1000|None\n")
    assert job_states(JOBS) == {
        "12": JobStatus("ended", "TIMEOUT"),
        "13_4": JobStatus("ended", "CANCELLED"),
    }


def test_elements_that_were_cancelled_with_their_array_are_not_gone(slurm):
    """Slurm lists an array of which nothing waits any more without the indices of what did."""
    slurm("squeue", "13|N/A|CANCELLED|N/A|None\n13|0|COMPLETED|N/A|None\n")
    slurm("sacct", code=1)
    slurm("scontrol", "JobId=13 ArrayJobId=13 ArrayTaskId=N/A JobState=CANCELLED Reason=None\n")
    jobs = [{"job": "13", "index": index} for index in (0, 4)]
    assert job_states(jobs) == {"13_0": JobStatus("ended", "COMPLETED"), "13_4": ENDED}


def test_without_accounts_scontrol_is_asked(slurm):
    slurm("squeue")
    slurm("sacct", err="Slurm accounting storage is disabled\n", code=1)
    slurm("scontrol", "JobId=12 JobName=x JobState=NODE_FAIL Reason=None StartTime=Unknown\n")
    assert job_states(JOBS[:1])["12"] == JobStatus("ended", "NODE_FAIL")
    assert slurm.words("scontrol") == ["show", "job", "12", "--oneliner"]


# An element of an array that was cancelled while it waited is "not found" where accounts are off.
@pytest.mark.parametrize(
    "words", ["slurm_load_jobs error: Invalid job id specified", "Job 12 not found"]
)
def test_job_that_nobody_knows_is_gone(slurm, words):
    slurm("squeue")
    slurm("sacct", err="Slurm accounting storage is disabled\n", code=1)
    slurm("scontrol", err=f"{words}\n", code=1)
    assert job_states(JOBS[:1])["12"] == JobStatus("gone")


def test_controller_that_does_not_answer_is_no_answer(slurm):
    why = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    slurm("squeue", err=f"{why}\n", code=1)
    unknown = JobStatus("unknown", f"squeue failed: {why}")
    assert job_states(JOBS) == {"12": unknown, "13_4": unknown}


def test_missing_tools_are_no_answer(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = job_states(JOBS[:1])["12"]
    assert answer.state == "unknown"
    assert "squeue is not installed here" in answer.reason


def test_tool_that_hangs_is_no_answer(slurm, monkeypatch, tmp_path):
    slurm("squeue")
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(scheduler, "_TIMEOUT_S", 0.2)
    assert "did not answer within" in job_states(JOBS[:1])["12"].reason


def test_squeue_is_called_once_for_all_jobs(slurm):
    slurm("squeue", "".join(f"{n}|N/A|RUNNING|N/A|None\n" for n in range(1500)))
    answers = job_states({"job": str(n), "index": None} for n in range(1500))
    assert {answer.state for answer in answers.values()} == {"running"}
    calls = [word for word in slurm.words("squeue") if word.startswith("--jobs=")]
    assert len(calls) == 1


def test_elements_that_wait_are_understood_where_slurm_lists_them_together(slurm):
    lines = ("9|3|RUNNING|N/A|None", "9|5-9,12-20:4%2|PENDING|N/A|JobArrayTaskLimit")
    slurm("squeue", "\n".join(lines) + "\n")
    jobs = [{"job": "9", "index": n} for n in (3, 5, 9, 12, 16, 20)]
    answers = job_states(jobs)
    assert answers.pop("9_3") == JobStatus("running")
    assert set(answers) == {"9_5", "9_9", "9_12", "9_16", "9_20"}
    assert set(answers.values()) == {JobStatus("pending", "JobArrayTaskLimit")}
    assert slurm.words("squeue")[-2] == "--jobs=9"
    assert slurm.letters("squeue") == "0\n"  # lists of tasks are not cut after 64 characters


def test_element_that_neither_squeue_nor_the_accounts_list_is_asked_for_by_its_array(slurm):
    slurm("squeue", "9|3|RUNNING|N/A|None\n")
    slurm("sacct", code=1)
    told = "JobId=10 ArrayJobId=9 ArrayTaskId=4-5%1 JobState=CANCELLED Reason=None"
    slurm("scontrol", f"JobId=11 ArrayJobId=9 ArrayTaskId=3 JobState=FAILED Reason=x\n{told}\n")
    answers = job_states({"job": "9", "index": n} for n in (3, 4, 6))
    assert answers == {
        "9_3": JobStatus("running"),
        "9_4": JobStatus("ended", "CANCELLED"),
        "9_6": JobStatus("gone"),
    }
    assert slurm.words("scontrol") == ["show", "job", "9", "--oneliner"]


def test_many_elements_are_cancelled_in_one_call(slurm):
    slurm("scancel")
    jobs = [{"job": "9", "index": n} for n in (7, 0, 1, 2)]
    cancel([*jobs, {"job": "12", "index": None}])
    assert slurm.words("scancel") == ["9_[0-2,7]", "12"]


def test_cancel_is_one_word_whatever_the_job_is_called(slurm):
    slurm("scancel")
    cancel([{"job": "12; touch evil", "index": None}])
    assert slurm.words("scancel") == ["12; touch evil"]
    assert not Path("evil").exists()


def test_refused_cancel_tells_slurms_own_words(slurm):
    slurm("scancel", err="scancel: error: Kill job error on job id 12: Access denied\n", code=1)
    with pytest.raises(RunError, match=r"job 12 cannot be cancelled: .* Access denied"):
        cancel([json.loads('{"job": "12", "index": null}')])


def test_thousands_of_jobs_and_tasks_fit_on_command_lines(slurm):
    """Linux lets one word have 128 KiB."""
    jobs = [{"job": f"{10**8 + n}", "index": None} for n in range(25_000)]
    slurm("squeue", "100024999|N/A|RUNNING|N/A|None\n")
    slurm("sacct", "".join(f"{job['job']}|COMPLETED|None\n" for job in jobs))
    states = job_states(jobs)
    assert states["100024999"] == JobStatus("running")
    assert states["100000000"] == JobStatus("ended", "COMPLETED")
    slurm("scancel")
    cancel([*jobs, *({"job": "9", "index": n} for n in range(0, 100_000, 2))])
    words = slurm.words("scancel")
    assert max(map(len, words)) < 2**13
    tasks = [task for word in words if "_" in word for task in word[3:-1].split(",")]
    assert tasks == [str(n) for n in range(0, 100_000, 2)]
    assert words[:25_000] == [job["job"] for job in jobs]
