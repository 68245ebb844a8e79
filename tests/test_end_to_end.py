"""The whole path as a user walks it: image files in, run folder and tables out, real ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from hires.core.store.attempts import Attempt
from hires.data.make_data import make_data
from hires.report import load
from hires.report.logged_messages import message_sums
from hires.report.tables import record_of
from tests.helpers.commands import hires
from tests.helpers.patience import PATIENCE_S, until

pytestmark = pytest.mark.dist
TINY = ["model=preact_resnet", "model.depth=11", "image=[37,33]", "batch=4", "steps=4"]


def run(folder: Path, *words: str) -> tuple[dict[str, Any], list[float]]:
    """Returns the record of a run, and the loss of every step, averaged over the replicas."""
    folder.mkdir(exist_ok=True)
    hires(folder, "run", *TINY, *words, "--json")
    [record] = folder.glob("results/*/*/record.json")
    lines = Attempt(record.parent, 0).metrics
    by_step: dict[int, list[float]] = {}
    for line in lines:
        if line["kind"] == "step" and line["loss"] is not None:
            by_step.setdefault(line["step"], []).append(line["loss"])
    means = [sum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)]
    return json.loads(record.read_text()), means


def test_training_from_image_files_has_the_losses_of_one_process(tmp_path: Path):
    make_data("textures", tmp_path / "images", 4, 16, [48, 40], 0)
    words = ["data=folder", f"data.path={tmp_path / 'images'}", "parallel.microbatches=4"]
    words += ["precision=fp64"]
    layout = ["parallel=sp+pp", "parallel.schedule=1f1b", "comm.log=full"]
    _, alone = run(tmp_path / "a", *words)
    record, losses = run(tmp_path / "b", *words, *layout)
    assert losses == pytest.approx(alone, rel=1e-9)
    assert record["state"] == "done"
    assert record["throughput"]["samples"] == 2  # four steps less two of warm-up
    assert {row["rank"] for row in record["memory"]} == set(range(record["world"]))
    assert all(row["peak_bytes"] > 0 for row in record["memory"])
    # The messages that it logged are those of its plan, and stand in the spans of its trace.
    sums = message_sums(record_of(record).comm)
    assert sums is not None
    assert (sums.first, sums.steps, sums.ranks, sums.differences()) == (2, 2, record["world"], [])
    assert {row["kind"] for row in sums.rows} >= {"halo", "norm", "gradient", "barrier"}
    assert 0 < (sums.share or 0) < 1
    folder = tmp_path / "b"
    [path] = folder.glob("results/*/*")
    out, _ = hires(folder, "show", path.name, "--timeline", "--trace", "trace.json")
    assert out.count("rank 1: ") == 2  # planned and measured
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    kinds = {event["cat"] for event in events if event["ph"] == "X"}
    assert {"wait", "halo", "collective", "gradient sum", "optimiser", "data"} <= kinds
    inside = [e for e in events if e.get("cat") in ("halo", "collective")]
    assert all(e["args"]["calls"] >= 1 and e["args"]["way"] for e in inside)
    each = sum(row["count"] for row in record["comm"]["planned"])
    assert len(load(path).calls) == 4 * each  # in four steps


def test_bf16_inference_holds_two_bytes_a_parameter(tmp_path: Path):
    record, losses = run(tmp_path, "task=infer", "precision=bf16", "parallel=sp+lp")
    [plan] = tmp_path.glob("results/*/*/plan.json")
    stages = json.loads(plan.read_text())["stages"]
    for row in record["memory"]:
        # Of a weight that its kernel holds in another order, one number is left beside it.
        assert 0 <= row["params_bytes"] - 2 * stages[row["stage"][0]]["params"] <= 2 * 20
        assert row["grads_bytes"] == 0
    assert losses == []
    sums = message_sums(record_of(record).comm)
    assert sums is not None
    assert sums.differences() == []  # of two bytes a number, too


def test_run_that_is_preempted_goes_on_by_the_script_of_its_folder(tmp_path: Path):
    def preempt() -> None:
        def under_way() -> bool:
            files = tmp_path.glob("results/*/*/a0/logs/rank*.metrics.jsonl")
            return sum(path.read_text().count('"kind": "step"') for path in files) >= 8

        until(under_way, "some steps", pause_s=0.02)
        os.kill(os.getpid(), signal.SIGUSR2)

    thread = threading.Thread(target=preempt)
    thread.start()
    hires(tmp_path, "run", *TINY, "steps=40", "parallel=sp", code=75)
    thread.join()
    [folder] = tmp_path.glob("results/*/*")
    end = json.loads((folder / "a0" / "exit.json").read_text())
    assert (end["state"], end["reason"]) == ("failed", "preempted")
    assert not list(tmp_path.glob("results/*/*/throughput.csv"))
    done = subprocess.run(
        ["sh", str(folder / "launch.sh")],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Throughput" in done.stdout
    record = json.loads((folder / "record.json").read_text())
    assert (record["state"], record["attempt"]) == ("done", 1)
    began = record["resumed"]["step"]
    assert 4 <= began < 40
    assert len(record["samples"]) == 40 - began
    out, _ = hires(tmp_path, "show", folder.name)
    assert f"it went on at step {began} from step{began:06d} of attempt a0" in out


SMALL_SENDS, SMALL_GATHERS = (
    {"operations": [name], "max_bytes": most}
    for name, most in (("send", 2048), ("all_gather", 200))
)
LARGE_SUMS, SMALL_SUMS = (
    {"operations": ["all_reduce"], "dtypes": ["float"], "min_bytes": least} for least in (65536, 16)
)
MEMORY = [
    {**SMALL_SENDS, "route": "shm"},
    {**SMALL_SENDS, "max_bytes": 4096, "route": "shm:message"},
    {**SMALL_GATHERS, "route": "shm"},
    {"operations": ["all_gather"], "route": "gloo:direct"},
    {**LARGE_SUMS, "route": "shm:segmented:32KiB"},
    {**SMALL_SUMS, "route": "shm:direct"},
]
MPI = [
    {**SMALL_SENDS, "route": "mpi"},
    {**SMALL_GATHERS, "route": "mpi"},
    {**LARGE_SUMS, "route": "mpi:segmented:8KiB"},
    {**SMALL_SUMS, "route": "mpi:direct"},
]


@pytest.mark.parametrize(
    ("rules", "launcher", "backends"),
    [
        pytest.param(MEMORY, "local", {"gloo", "shm"}, id="memory"),
        pytest.param(MPI, "mpirun", {"gloo", "mpi"}, marks=pytest.mark.mpi, id="mpi"),
    ],
)
def test_run_over_several_backends_equals_one_process_and_travels_as_planned(
    tmp_path: Path, rules, launcher, backends
):
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun here; make test-mpi installs it")
    table = {"format": 2, "rules": rules, "default": "gloo"}
    (tmp_path / "table.json").write_text(json.dumps(table))
    words = [f"launcher={launcher}", "parallel=sp+gems", "comm=mix", "comm.table=table.json"]
    record, _ = run(tmp_path, *words)
    sums = message_sums(record_of(record).comm)
    assert sums is not None
    assert sums.differences() == []
    assert {row["backend"] for row in sums.rows} == backends
    hires(tmp_path, "verify", *TINY, *words)  # below 1e-10, or it exits with another code
