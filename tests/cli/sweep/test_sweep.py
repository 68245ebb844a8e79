"""One command plans many runs, runs what can run, counts each once, and goes on where it was
stopped."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hires.cli import execution, planning
from hires.core.errors import PlanError, RunError
from hires.core.store import campaign, provenance
from tests.helpers.commands import SMALL, fake_hires
from tests.helpers.patience import PATIENCE_S, until
from tests.helpers.run_folders import begin

pytestmark = pytest.mark.usefixtures("traced")
FOLDER = Path("results/default")
TWO = ("sweep", *SMALL, "precision=fp32,bf16")


def runs() -> list[Path]:
    return sorted(path.parent for path in FOLDER.glob("*/config.yaml"))


def recorded() -> campaign.Campaign:
    return campaign.read(FOLDER)


def test_sweep_runs_every_point_and_ends_with_one_table(hires, fake_ranks, monkeypatch):
    words = ("sweep", *SMALL, "parallel=single,sp")
    answer = hires(*words)
    assert answer.code == 0, answer.err
    assert "2 points: 2 to run, 0 complete, 0 excluded" in answer.out
    assert "2 of 2 attempts done" in answer.err
    table = answer.out[answer.out.index("Throughput") :]
    for layout, run in zip(("single", "sp"), runs(), strict=True):
        assert answer.out.count(f"parallel={layout} ") == 1  # as a point
        assert run.name.rpartition("-")[2] in table  # as a result
        assert f" {layout} " in table
    for run in runs():
        assert {"throughput.csv", "memory.md"} <= {file.name for file in run.iterdir()}
    rows = (FOLDER / "throughput.csv").read_text().splitlines()
    hashes = [row.split(",")[0] for row in rows[1:]]
    assert hashes == [point.run.rpartition("-")[2] for point in recorded().points]
    # Each run can be made again alone.
    line = shlex.split(json.loads((runs()[0] / "record.json").read_text())["reproduce"])[1:]
    assert "complete since an earlier time" in hires(*line).err
    # Complete points are skipped without tracing unless they are asked for again.
    assert hires(*words[:-1], "parallel=sp", "--again").code == 0
    assert [(run / "a1").exists() for run in runs()] == ["-sp-" in run.name for run in runs()]
    monkeypatch.setattr("hires.cli.planning.make_plan", None)
    answer = hires(*words)
    assert (answer.code, "2 points: 0 to run, 2 complete" in answer.out) == (0, True), answer.err


def test_a_raising_point_fails_the_sweep_and_stops_no_other(hires, fake_ranks, monkeypatch):
    class Process(planning.TorchProcess):
        def trace(self, config):
            if config.batch != 4:
                raise {2: RunError, 8: PlanError}[config.batch]("no such width")
            return super().trace(config)

    monkeypatch.setattr(planning, "TorchProcess", Process)
    answer = hires("sweep", *SMALL, "batch=2,4,8", "--json")
    assert answer.code == 1
    facts = json.loads(answer.out)
    assert [point["state"] for point in facts["excluded"]] == ["failed", "infeasible"]
    assert [point["state"] for point in facts["points"]] == ["done"]
    assert "batch=2 failed before it was started: no such width" in answer.err
    assert [point.state for point in recorded().excluded] == ["failed", "infeasible"]
    assert {(point.what or {}).get("model") for point in recorded().excluded} == {"resnet18"}
    assert hires("status", "default").out.count("failed") >= 1


def test_points_whose_memory_is_unknown_run_alone(hires, fake_ranks, monkeypatch):
    # They counted as needing nothing, and ran side by side.
    class Process(planning.TorchProcess):
        def footprint(self, config, plan):
            raise RunError("killed")

    queues = []

    def queue(tasks, rooms, *more, **facts):
        queues.append(kept(tasks, rooms, *more, **facts))
        assert [task.needs_bytes for task in tasks] == [rooms.memory_bytes] * 2
        return queues[0]

    kept = execution.LocalQueue
    monkeypatch.setattr(planning, "TorchProcess", Process)
    monkeypatch.setattr(execution, "LocalQueue", queue)
    answer = hires(*TWO, "--max-parallel", "2")
    assert (answer.code, len(queues)) == (0, 1), answer.err
    assert "the memory of the ranks could not be predicted: killed" in answer.err


def test_dry_run_writes_nothing(hires):
    answer = hires("sweep", *SMALL, "steps=1,3", "--dry-run")
    assert answer.code == 0
    assert "1 to run, 0 complete, 1 excluded" in answer.out
    assert not Path("results").exists()
    words = ("parallel=single,sp", "precision=fp32,bf16", "--cfg", "job")
    answer = hires("sweep", *SMALL, *words, "--where", "ranks == 1 or precision == 'bf16'")
    assert answer.out.count("---") == 3
    answer = hires("sweep", *SMALL, "parallel=lp", "parallel.stages=98,99")
    assert (answer.code, "0 to run" in answer.out) == (3, True)


def test_stored_sweep_is_overridden_by_the_command_line(hires, fake_ranks, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "two.yaml").write_text(
        "# Two precisions\noverrides:\n- precision=fp32,bf16\n- batch=9\nrepeat: 2\n"
    )
    words = ("sweep", "experiment=two", *SMALL, "--config-dir", "mine")
    answer = hires(*words, "--order", "interleaved")
    ended = [line.split() for line in answer.err.splitlines() if line.startswith("[")]
    assert [line[2] for line in ended] == ["a0:", "a0:", "a1:", "a1:"]  # in turn
    assert len((FOLDER / "throughput.csv").read_text().splitlines()) == 5
    assert "\nbatch: 4\n" in (runs()[0] / "config.yaml").read_text()
    lines = [json.loads((run / "a0/env.json").read_text())["reproduce"] for run in runs()]
    assert all(line.endswith(" --config-dir mine") for line in lines)  # for a run alone
    assert "2 complete" in hires(*words, "--dry-run").out
    assert "ready (2 of 3)" in hires(*words, "--repeat=3", "--dry-run").out


def test_failed_point_does_not_stop_the_others_and_is_tried_again(hires, fake_ranks):
    fake_ranks({"0": "picky fp32"})
    answer = hires(*TWO)
    assert answer.code == 1
    assert "1 of 2 attempts done" in answer.err
    assert "fp32" in answer.err.split("hires: ")[-1]
    assert "logs: " in answer.err
    assert len((FOLDER / "throughput.csv").read_text().splitlines()) == 2
    fake_ranks({})
    answer = hires(*TWO)
    assert (answer.code, "1 to run, 1 complete" in answer.out) == (0, True)
    assert [(run / "a1").exists() for run in runs()] == ["fp32" in run.name for run in runs()]


def test_ctrl_c_leaves_the_rest_pending_and_the_same_command_goes_on(hires, fake_ranks):
    fake_ranks({"0": f"interrupt {os.getpid()}"})
    answer = hires(*TWO)
    assert answer.code == 130
    assert "1 attempt is pending (stopped by Ctrl-C); run the same command" in answer.err
    assert len(recorded().points) == 2
    assert not (FOLDER / ".sweep.lock").exists()
    fake_ranks({})
    assert "2 of 2 attempts done" in hires(*TWO).err


def test_sigusr2_saves_what_runs_and_leaves_the_rest_pending(hires, fake_ranks):
    fake_ranks({"0": "saver"})

    def ask():
        logs = lambda: FOLDER.glob("*/a0/logs/rank0000.log")  # noqa: E731
        until(lambda: any("listens" in path.read_text() for path in logs()))
        os.kill(os.getpid(), signal.SIGUSR2)

    thread = threading.Thread(target=ask)
    thread.start()
    answer = hires(*TWO)
    thread.join()
    assert answer.code == 75
    assert "1 attempt saved; run the same command again to resume" in answer.err
    assert "1 attempt is pending (stopped by SIGUSR2)" in answer.err
    assert "failed" not in answer.err


def test_second_sweep_of_a_campaign_is_refused_with_the_process_named(hires, fake_ranks):
    script = (
        "import sys; from pathlib import Path; from hires.core.store.campaign import locked\n"
        "with locked(Path('results/default').absolute()):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    words = ("sweep", *SMALL, "seed=0")
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        answer = hires(*words)
        assert answer.code == 1
        assert f"process {process.pid} on" in answer.err
        assert "a sweep of campaign 'default' is under way already" in answer.err
        assert runs() == []
        assert hires(*words, "--dry-run").code == 0
        process.kill()
    answer = hires(*words)
    assert answer.code == 0
    assert f"note: {FOLDER.absolute() / '.sweep.lock'} was left by process" in answer.err


def test_plans_are_shared_where_keys_do_not_matter(hires, monkeypatch):
    plans, real = [], planning.make_plan
    monkeypatch.setattr(planning, "make_plan", lambda *args: plans.append(args) or real(*args))
    answer = hires(*TWO, "seed=range(0,5)", "optimizer.lr=0.1,0.2", "--dry-run")
    assert (answer.code, "20 points: 20 to run" in answer.out) == (0, True)
    assert len(plans) == 2


def test_point_that_another_machine_runs_is_left_to_it_as_it_is(hires, fake_ranks):
    fake_ranks({"0": "exit 1"})
    assert hires("sweep", *SMALL, "seed=0").code == 1
    fake_ranks({})
    [run] = runs()
    begin(run, 1, host="another", boot="1", space="pid:[1]", pid=7)
    before = (run / "config.yaml").read_bytes()
    answer = hires("sweep", *SMALL, "seed=0,1", "comm.timeout_s=7")
    assert answer.code == 0, answer.err
    assert f"{run.name} is left out: process 7 on another runs attempt a1" in answer.err
    assert "1 of 1 attempts done" in answer.err
    assert (run / "config.yaml").read_bytes() == before
    assert not (run / "a2").exists()


def test_point_that_lacks_attempts_is_pending(hires, fake_ranks):
    words = ("sweep", *SMALL, "--json")
    assert json.loads(hires(*words).out)["points"][0]["state"] == "done"
    begin(runs()[0], 1, host="another", boot="1", space="pid:[1]", pid=7)
    [point] = json.loads(hires(*words, "--repeat", "2").out)["points"]
    assert (point["state"], point["complete_attempts"]) == ("pending", [0])


WORDS = ("sweep", *SMALL, "parallel=sp", "campaign=mend", "seed=0,1,2")
RANKS = {str(rank): "once 1" for rank in range(2)}
"""The first attempt of seed 1 hangs until something is killed."""


def run_of(seed: int) -> Path:
    """Returns the run folder of a seed."""
    for config in Path("results/mend").glob("*/config.yaml"):
        if f"\nseed: {seed}\n" in f"\n{config.read_text()}":
            return config.parent
    return Path("none")


def pids(name: str) -> list[int]:
    """Returns the processes of the events of one kind in the first attempt of seed 1."""
    path = run_of(1) / "a0" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [one["pid"] for one in map(json.loads, lines) if one["event"] == name]


def exits() -> list[list[str]]:
    """Returns for each seed the states in which its attempts ended."""
    files = [sorted(run_of(seed).glob("a[0-9]*/exit.json")) for seed in range(3)]
    return [[json.loads(path.read_text())["state"] for path in one] for one in files]


def test_killed_process_is_mended_by_the_same_command(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with fake_hires(graph, RANKS, *WORDS) as sweep:
        until(lambda: len(pids("rank_started")) == 2)
        processes = [*pids("rank_started"), *pids("launch_started")]
        sweep.kill()
        sweep.communicate(timeout=PATIENCE_S)
    until(lambda: all(provenance.state_of(pid) in (None, "Z") for pid in processes))
    assert sweep.returncode == -signal.SIGKILL
    assert exits() == [["done"], [], []]
    with fake_hires(graph, RANKS, *WORDS) as again:
        _, err = again.communicate(timeout=PATIENCE_S)
    assert (again.returncode, "which is gone; taken over" in err) == (0, True), err
    assert exits() == [["done"], ["lost", "done"], ["done"]]
    records = [json.loads((run_of(seed) / "record.json").read_text()) for seed in range(3)]
    assert [(one["state"], one["attempt"]) for one in records] == [
        ("done", 0),
        ("done", 1),
        ("done", 0),
    ]
    campaign = json.loads(Path("results/mend/campaign.json").read_text())
    assert len(campaign["points"]) == len({point["run"] for point in campaign["points"]}) == 3
    assert len(campaign["sweeps"]) == 2
    table = Path("results/mend/throughput.csv").read_text().splitlines()
    assert len(table) == 1 + 3  # every run counts once
    assert not [*Path("results/mend").glob(".*")]  # no lock
