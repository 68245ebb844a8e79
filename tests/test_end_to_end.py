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
from tests.conftest import REPOSITORY
from tests.helpers.commands import hires
from tests.helpers.patience import PATIENCE_S, until

pytestmark = pytest.mark.dist

TINY = ["model=preact_resnet", "model.n=1", "image=[37,33]", "batch=4", "steps=4"]


def run(folder: Path, *words: str) -> tuple[dict[str, Any], list[float]]:
    """Returns the record of a run, and the loss of every step, averaged over the replicas."""
    folder.mkdir(exist_ok=True)
    own = any(word.startswith("model=") for word in words)
    hires(folder, "run", *(TINY[2:] if own else TINY), *words, "--json")
    [record] = folder.glob("results/*/*/record.json")
    lines = [json.loads(t) for t in (record.parent / "a0/metrics.jsonl").read_text().splitlines()]
    by_step: dict[int, list[float]] = {}
    for line in lines:
        if line["kind"] == "step" and line["loss"] is not None:
            by_step.setdefault(line["step"], []).append(line["loss"])
    means = [sum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)]
    return json.loads(record.read_text()), means


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "textures"
    make_folder(folder, 4, 16, [48, 40], 0)
    return folder


def test_training_from_image_files_has_the_losses_of_one_process(images: Path, tmp_path: Path):
    words = ["data=folder", f"data.path={images}", "parallel.microbatches=4"]
    layout = ["parallel=sp+pp", "parallel.schedule=1f1b", "comm.log=full"]
    _, alone = run(tmp_path / "a", *words, "precision=fp64")
    record, losses = run(tmp_path / "b", *words, *layout, "precision=fp64")
    assert losses == pytest.approx(alone, rel=1e-9)
    assert record["state"] == "done"
    assert record["throughput"]["samples"] == 2  # four steps less two of warm-up
    assert {row["rank"] for row in record["memory"]} == set(range(record["world"]))
    assert all(row["peak_bytes"] > 0 for row in record["memory"])
    check_time_line(tmp_path / "b", record)


def check_time_line(folder: Path, record: dict[str, Any]) -> None:
    """Compares the messages that a run logged with its plan, and with the spans of its trace."""
    sums = message_sums(record)
    assert sums is not None
    assert (sums.first, sums.steps, sums.ranks, sums.differences()) == (2, 2, record["world"], [])
    assert {row["kind"] for row in sums.rows} >= {"halo", "norm", "gradient", "barrier"}
    assert sums.share is not None
    assert 0 < sums.share < 1
    [path] = folder.glob("results/*/*")
    out, _ = hires(folder, "show", path.name, "--timeline", "--trace", "trace.json")
    assert out.count("rank 1: ") == 2  # planned and measured
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    kinds = {event["cat"] for event in events if event["ph"] == "X"}
    assert {"wait", "halo", "collective", "gradient sum", "optimiser", "data"} <= kinds
    inside = [e for e in events if e.get("cat") in ("halo", "collective")]
    assert all(e["args"]["calls"] >= 1 and e["args"]["way"] for e in inside)
    hires(folder, "show", path.name, "--messages", "m.csv")
    lines = (folder / "m.csv").read_text().splitlines()
    each = sum(row["count"] for row in record["comm"]["planned"])
    assert len(lines) - 1 == 4 * each  # in four steps


def test_bf16_inference_holds_two_bytes_a_parameter(tmp_path: Path):
    record, losses = run(tmp_path, "task=infer", "precision=bf16", "parallel=sp+lp")
    [plan] = tmp_path.glob("results/*/*/plan.json")
    stages = json.loads(plan.read_text())["stages"]
    for row in record["memory"]:
        # Of a weight that its kernel holds in another order, one number is left beside it.
        assert 0 <= row["params_bytes"] - 2 * stages[row["stage"][0]]["params"] <= 2 * 20
        assert row["grads_bytes"] == 0
    assert losses == []
    sums = message_sums(record)
    assert sums is not None
    assert sums.differences() == []  # of two bytes a number, too


def test_super_resolution_learns_from_a_folder_of_images(tmp_path: Path, images: Path):
    small = ["model=edsr", "model.blocks=2", "model.width=8", "image=[12,11]", "batch=8"]
    words = ["data=pairs", f"data.path={images}", "parallel=sp+lp", "steps=20"]
    _, losses = run(tmp_path, *small, *words)
    assert len(losses) == 20
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_broken_image_and_a_loss_that_is_no_number_are_explained(tmp_path: Path):
    make_folder(tmp_path / "images", 2, 4, [40, 40], 0)
    broken = sorted((tmp_path / "images").glob("*/*.tif*"))[0]
    broken.write_bytes(broken.read_bytes()[:100])
    words = ["run", *TINY, "data=folder", "data.path=images", "parallel=sp"]
    _, err = hires(tmp_path, *words, code=3)  # found by the plan: no rank is started
    assert broken.name in err
    assert "Traceback" not in err
    hires(tmp_path, "run", *TINY, "parallel=sp", "optimizer.lr=1e30", code=1)
    [folder] = tmp_path.glob("results/*/*")
    out, _ = hires(tmp_path, "show", folder.name, "--timeline")
    assert "rank 0: " in out.split("measured")[1]  # it keeps its last steps


def interrupted(folder: Path, attempt: int, words: list[str], kill: Any) -> tuple[int, str]:
    """Runs a command until an attempt has done some steps; ``kill`` gets it and its events."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hires", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    def found() -> list[Path]:
        files = folder.glob(f"results/*/*/a{attempt}/metrics.jsonl")
        return [path for path in files if path.read_text().count('"kind": "step"') >= 8]

    try:
        [metrics] = until(found, "some steps", pause_s=0.05)
        kill(process, metrics.with_name("events.jsonl"))
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, err


def kill_rank_1(process: subprocess.Popen[str], events: Path) -> None:
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    [pid] = [e["pid"] for e in lines if e["event"] == "rank_started" and e["rank"] == 1]
    os.kill(pid, signal.SIGKILL)


def test_run_that_is_preempted_and_killed_goes_on_with_the_same_command(tmp_path: Path):
    words = ["run", *TINY, "steps=150", "parallel=sp"]
    code, err = interrupted(tmp_path, 0, words, lambda p, _: p.send_signal(signal.SIGUSR2))
    assert code == 75, err
    [folder] = tmp_path.glob("results/*/*")
    left = json.loads((folder / "a0" / "exit.json").read_text())
    assert (left["state"], left["reason"]) == ("failed", "preempted")
    code, err = interrupted(tmp_path, 1, words, kill_rank_1)
    assert code == 1, err
    assert "rank 1" in err
    assert "SIGKILL" in err
    record = json.loads((folder / "record.json").read_text())
    assert record["state"] == "failed"
    assert not list(tmp_path.glob("results/*/*/throughput.csv"))
    # By the script of the folder, from anywhere.
    done = subprocess.run(
        ["sh", str(folder / "launch.sh")],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Throughput" in done.stdout
    record = json.loads((folder / "record.json").read_text())
    assert (record["state"], record["attempt"]) == ("done", 2)
    began = record["resumed"]["step"]
    assert 4 <= began < 150
    assert len(record["samples"]) == 150 - began
    out, _ = hires(tmp_path, "show", folder.name)
    assert f"it went on at step {began} from step{began:06d} of attempt a0" in out
