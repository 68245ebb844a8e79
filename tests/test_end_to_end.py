"""The whole path as a user walks it: image files in, run folder and tables out, real ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hires.data.textures import make_folder
from hires.report.read.message_rows import message_sums
from tests.helpers.commands import hires
from tests.helpers.patience import PATIENCE_S, until

pytestmark = pytest.mark.dist

REPOSITORY = Path(__file__).resolve().parents[1]
TINY = ["model=preact_resnet", "model.n=1", "image=[37,33]", "batch=4", "steps=4"]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-m", "hires", *words],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(folder: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the record and the metrics lines of a run."""
    own = any(word.startswith("model=") for word in words)
    hires(folder, "run", *(TINY[2:] if own else TINY), *words, "--json")
    [record_file] = folder.glob("results/*/*/record.json")
    lines = (record_file.parent / "a0" / "metrics.jsonl").read_text().splitlines()
    return json.loads(record_file.read_text()), [json.loads(line) for line in lines]


def losses(lines: list[dict[str, Any]]) -> list[float]:
    """Returns the loss of every step, averaged over the replicas."""
    steps = [line for line in lines if line["kind"] == "step" and line["loss"] is not None]
    numbers = sorted({line["step"] for line in steps})
    grouped = [[line["loss"] for line in steps if line["step"] == n] for n in numbers]
    return [sum(group) / len(group) for group in grouped]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "textures"
    make_folder(folder, 4, 16, [48, 40], 0)
    return folder


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, images: Path) -> list[float]:
    """Losses of one process over four microbatches in float64."""
    folder = tmp_path_factory.mktemp("single")
    words = ["data=folder", f"data.path={images}", "precision=fp64", "parallel.microbatches=4"]
    return losses(run(folder, *words)[1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layout",
    [
        ["parallel=sp+pp", "parallel.microbatches=4", "parallel.schedule=1f1b"],
        ["parallel=sp", "parallel.tiles=[1,2]", "parallel.replicas=2", "parallel.microbatches=2"],
    ],
)
def test_training_from_image_files_gives_the_same_losses_in_every_layout(
    layout: list[str], images: Path, one_process: list[float], tmp_path: Path
):
    words = ["data=folder", f"data.path={images}", "precision=fp64"]
    record, lines = run(tmp_path, *words, *layout)
    assert losses(lines) == pytest.approx(one_process, rel=1e-9)
    assert record["state"] == "done"
    assert record["throughput"]["samples"] == 2  # four steps less two of warm-up
    assert {row["rank"] for row in record["memory"]} == set(range(record["world"]))
    assert all(row["peak_bytes"] > 0 for row in record["memory"])


def test_bf16_training_stays_close_to_one_process(
    images: Path, one_process: list[float], tmp_path: Path
):
    # 8 bits of mantissa: each of about 10 layers rounds with 2^-9, so the first loss, before any
    # step has been taken, agrees within 10 * 2^-9 = 2 % of its size, whatever the layout.
    words = ["data=folder", f"data.path={images}", "precision=bf16"]
    _, lines = run(tmp_path, *words, "parallel=sp+pp", "parallel.microbatches=4")
    assert losses(lines)[0] == pytest.approx(one_process[0], rel=2e-2)
    assert losses(lines)[0] != pytest.approx(one_process[0], rel=1e-6)  # it is no fp32 in disguise


def test_bf16_inference_holds_two_bytes_a_parameter(tmp_path: Path):
    record, lines = run(tmp_path, "task=infer", "precision=bf16", "parallel=sp+lp")
    [plan] = tmp_path.glob("results/*/*/plan.json")
    stages = json.loads(plan.read_text())["stages"]
    for row in record["memory"]:
        # Of a weight that its kernel holds in another order, one number is left beside it.
        assert 0 <= row["params_bytes"] - 2 * stages[row["stage"][0]]["params"] <= 2 * 20
        assert row["grads_bytes"] == 0
    assert all(line["loss"] is None for line in lines if line["kind"] == "step")
    sums = message_sums(record)
    assert sums is not None
    assert sums.differences() == []  # of two bytes a number, too


@pytest.mark.slow
def test_killed_rank_is_named_and_nothing_looks_complete(tmp_path: Path):
    process = start(tmp_path, "run", *TINY, "steps=100000", "parallel=sp")
    try:
        metrics = _wait_for(tmp_path, "results/*/*/a0/metrics.jsonl", '"step": 3')
        pid = _rank_pid(metrics.parent / "events.jsonl", 1)
        os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "rank 1" in err
    assert "SIGKILL" in err
    record = json.loads((metrics.parents[1] / "record.json").read_text())
    assert record["state"] == "failed"
    assert not list(tmp_path.glob("results/*/*/throughput.csv"))


def _wait_for(folder: Path, pattern: str, text: str) -> Path:
    """Returns the file of that pattern once it holds a text."""

    def found() -> list[Path]:
        return [path for path in folder.glob(pattern) if text in path.read_text()]

    return until(found, f"{text} in {pattern}", pause_s=0.05)[0]


def _rank_pid(events: Path, rank: int) -> int:
    """Returns the process of a rank."""
    for line in events.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "rank_started" and event["rank"] == rank:
            return int(event["pid"])
    raise AssertionError(f"rank {rank} never started")


@pytest.mark.slow
def test_run_that_is_asked_to_make_way_goes_on_with_the_same_command(tmp_path: Path):
    words = ["run", *TINY, "steps=60", "parallel=sp"]
    process = start(tmp_path, *words)
    try:
        metrics = _wait_for(tmp_path, "results/*/*/a0/metrics.jsonl", '"step": 3')
        process.send_signal(signal.SIGUSR2)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 75, err
    assert "it made way for others (SIGUSR2) after" in err
    run_dir = metrics.parents[1]
    left = json.loads((run_dir / "a0" / "exit.json").read_text())
    assert (left["state"], left["reason"]) == ("failed", "preempted")
    hires(tmp_path, *words)
    record = json.loads((run_dir / "record.json").read_text())
    assert (record["state"], record["attempt"]) == ("done", 1)
    began = record["resumed"]["step"]
    assert 4 <= began < 60
    assert len(record["samples"]) == 60 - began
    out, _ = hires(tmp_path, "show", run_dir.name)
    assert f"it went on at step {began} from step{began:06d} of attempt a0" in out
    assert f"checkpoints: step{began:06d} (" in out


def test_broken_image_is_named_without_a_traceback(tmp_path: Path):
    make_folder(tmp_path / "images", 2, 4, [40, 40], 0)
    broken = sorted((tmp_path / "images").glob("*/*.tif*"))[0]
    broken.write_bytes(broken.read_bytes()[:100])
    words = ["run", *TINY, "data=folder", "data.path=images", "parallel=sp"]
    _, err = hires(tmp_path, *words, code=3)  # found by the plan: no rank is started
    assert broken.name in err
    assert "Traceback" not in err


def check_messages(record: dict[str, Any], events: list[dict[str, Any]], written: str) -> None:
    """Compares the messages that a run logged with its plan, and with the spans of its trace."""
    sums = message_sums(record)
    assert sums is not None
    assert (sums.first, sums.steps, sums.ranks, sums.differences()) == (2, 2, 3, [])
    assert {row["kind"] for row in sums.rows} >= {"halo", "norm", "join", "gradient", "barrier"}
    assert sums.share is not None
    assert 0 < sums.share < 1
    inside = [e for e in events if e.get("cat") in ("halo", "collective")]
    assert inside
    assert all(e["args"]["calls"] >= 1 and e["args"]["way"] for e in inside)
    assert "messages of 3 ranks" in written


@pytest.mark.slow
def test_time_line_of_a_run_is_exported_and_foretold(tmp_path: Path):
    words = ["parallel.stages=2", "parallel.tiles=[2,1]", "parallel.microbatches=2"]
    record, _ = run(tmp_path, "parallel=sp+pp", "comm.log=full", *words)
    [folder] = tmp_path.glob("results/*/*")
    out, _ = hires(tmp_path, "show", folder.name, "--timeline", "--trace", "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = {event["args"]["step"] for event in events if event["ph"] == "X"}
    passes = [e for e in events if e.get("cat") in ("forward", "backward")]
    assert len(passes) == 2 * 3 * 4 * len(steps)  # measured and planned, ranks, actions
    kinds = {event["cat"] for event in events if event["ph"] == "X"}
    assert {"wait", "halo", "collective", "gradient sum", "optimiser", "data"} <= kinds
    assert out.count("rank 2: ") == 2
    check_messages(record, events, hires(tmp_path, "show", folder.name, "--messages", "m.csv")[0])
    lines = (tmp_path / "m.csv").read_text().splitlines()
    each = sum(row["count"] for row in record["comm"]["planned"])
    assert len(lines) - 1 == 4 * each  # in four steps
    # A benchmark ends its process, so it has one of its own.
    bench = start(tmp_path, "bench", "simulate", "--only", "runs", "--from", str(folder), "--json")
    out, err = bench.communicate(timeout=240)
    assert bench.returncode == 0, err
    [compared] = json.loads(out)["runs"]
    assert compared["ranks"] == 3
    assert compared["simulated_s"] > 0


def test_failed_run_keeps_the_time_line_of_its_last_steps(tmp_path: Path):
    hires(tmp_path, "run", *TINY, "parallel=sp", "optimizer.lr=1e30", code=1)
    [folder] = tmp_path.glob("results/*/*")
    out, _ = hires(tmp_path, "show", folder.name, "--timeline")
    assert "rank 0: " in out.split("measured")[1]


@pytest.mark.slow
def test_launch_script_repeats_the_run_by_hand(tmp_path: Path):
    run(tmp_path, "parallel=lp")
    [script] = tmp_path.glob("results/*/*/launch.sh")
    done = subprocess.run(
        ["sh", str(script)], capture_output=True, text=True, timeout=120, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    exit_file = script.parent / "a1" / "exit.json"
    assert json.loads(exit_file.read_text())["state"] == "done"
    assert "Throughput" in done.stdout


def test_super_resolution_learns_from_a_folder_of_images(tmp_path: Path, images: Path):
    small = ["model=edsr", "model.blocks=2", "model.width=8", "image=[12,11]", "batch=8"]
    words = ["data=pairs", f"data.path={images}", "parallel=sp+lp", "steps=20"]
    found = losses(run(tmp_path, *small, *words)[1])
    assert len(found) == 20
    assert sum(found[-3:]) < 0.9 * sum(found[:3])


@pytest.mark.slow
def test_sweep_of_two_layouts_ends_in_the_tables_of_both(tmp_path: Path):
    words = ["sweep", *TINY, "parallel=single,sp", "parallel.stages=1,99", "--max-parallel", "2"]
    out, err = hires(tmp_path, *words)
    assert "nearest that can run" in out
    assert "2 of 2 attempts done" in err
    rows = (tmp_path / "results/default/throughput.csv").read_text().splitlines()
    assert len(rows) == 3
    assert all(run in out for run in (row.split(",")[0] for row in rows))
    records = [json.loads(path.read_text()) for path in tmp_path.glob("results/*/*/record.json")]
    assert sorted(record["layout"] for record in records) == ["single", "sp"]
    assert {record["state"] for record in records} == {"done"}
