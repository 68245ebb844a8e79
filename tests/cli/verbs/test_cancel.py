"""``hires cancel`` stops what runs or waits, and nothing and nobody else; what it could not stop is
an error."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from hires.core.store import provenance
from hires.launcher.status import running_elsewhere, state
from tests.helpers.commands import SMALL, fake_hires
from tests.helpers.patience import PATIENCE_S, until
from tests.helpers.run_folders import begin, done, make_run, submitted

RUN = "resnet18-64x64-single-fp32-"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(state, "AGAIN_S", 0.01)


def ended(run: Path) -> str:
    return json.loads((run / "a0" / "exit.json").read_text())["state"]


def test_what_has_not_ended_is_an_error_with_its_remedy(hires, tmp_path, monkeypatch):
    monkeypatch.setattr(running_elsewhere, "WAIT_S", 0.2)
    begin(make_run(tmp_path / "results"))  # by this process, which reads no request
    answer = hires("cancel", "0123abcd")
    assert (answer.code, f"kill -9 {os.getpid()}" in answer.err) == (1, True)
    assert "other runs" not in answer.err


def test_run_of_a_sweep_is_a_thread_that_may_end_before_its_process(hires, tmp_path, monkeypatch):
    monkeypatch.setattr(running_elsewhere, "WAIT_S", 0.2)
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    begin(make_run(tmp_path / "results"), thread=thread.native_id)
    answer = hires("cancel", "0123abcd")
    assert (answer.code, "ends it, all its other runs and" in answer.err) == (1, True)
    over.set()
    thread.join()
    until(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists(), "the thread's end")
    assert "is lost" in hires("cancel", "0123abcd").out


def test_processes_of_another_machine_or_container_are_never_signalled(hires, tmp_path):
    run = make_run(tmp_path / "results")
    begin(run, host="another-machine", boot="x", pid=os.getpid())
    answer = hires("cancel", "0123abcd")
    assert answer.code == 1
    assert "on another-machine, which cannot be seen from here" in answer.err
    begin(run, 1, **{**provenance.myself(), "space": "pid:[1]"})
    assert hires("cancel", "0123abcd").code == 1
    [answered] = json.loads(hires("cancel", "default", "--json").out)["runs"]
    assert (answered["run"], answered["stopped"], answered["state"]) == (run.name, False, "running")
    assert "cannot be seen from here" in answered["message"]
    done(run, 1)
    assert hires("cancel", "default").out == f"{run.name}: is done; there is nothing to cancel\n"
    answered = {"run": run.name, "state": "done", "message": "is done; there is nothing to cancel"}
    answer = json.loads(hires("cancel", "default", "--json").out)
    assert answer == {"sweeps": [], "runs": [{**answered, "stopped": True}]}
    for words, text in (([], "name the runs or campaigns"), (["x"], "'x' is no campaign and no")):
        answer = hires("cancel", *words)
        assert (answer.code, text in answer.err) == (2, True)


def test_all_elements_of_a_campaign_are_cancelled_in_one_call_those_that_wait_first(
    hires, tmp_path, cluster
):
    cluster("squeue", "printf '7|0|RUNNING|N/A|None\\n7|1-3|PENDING|N/A|Priority\\n'")
    cluster("scancel", f'echo "$@" >> {tmp_path}/scancel')
    runs = [make_run(tmp_path / "results", f"{RUN}{n}") for n in range(4)]
    for index, run in enumerate(runs):
        submitted(run, job="7", index=index)
    begin(runs[0])
    answer = hires("cancel", "default")
    assert (answer.code, {*(tmp_path / "scancel").read_text().split()}) == (
        0,
        {f"7_{n}" for n in range(4)},
    )
    # So that none starts in the place of the one that runs.
    names = [line.partition(":")[0] for line in answer.out.splitlines()]
    assert names == [run.name for run in (*runs[1:], runs[0])]
    assert [ended(run) for run in runs[1:]] == ["cancelled"] * 3
    assert not (runs[0] / "a0" / "exit.json").exists()  # its supervisor writes its own
    cause = json.loads((runs[3] / "a0" / "exit.json").read_text())["cause"]
    assert cause == "job 7_3 was cancelled while it waited"  # Slurm itself forgets such an element


def test_sweep_on_this_machine_starts_nothing_more(tmp_path, hires, graph):
    started = fake_hires(graph, {"0": "hang"}, "sweep", *SMALL, "seed=0,1,2")
    with started as process:
        try:
            until(lambda: [*Path("results").glob("*/*/a0/logs/rank0000.log")])
            answer = hires("cancel", "default")
            _, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "2 attempts are pending (stopped by hires cancel)" in err
    assert (answer.code, "its sweep starts nothing more, and has ended" in answer.out) == (0, True)
    [path] = Path("results").glob("*/*/a0")
    assert ended(path.parent) == "cancelled"
