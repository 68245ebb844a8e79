"""Run folders in any state, as launchers leave them, without a single rank."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from hires.core.ranks.heartbeat import alive_file
from hires.core.store import checkpoints, file_names, provenance, records

CONFIG = "image: [64, 64]\nbatch: 8\nsteps: 100\nmeasure:\n  steps: 7\nmodel:\n  name: resnet\n"


def make_run(results: Path, name: str = "resnet18-64x64-single-fp32-0123abcd") -> Path:
    """Makes a frozen run folder without an attempt."""
    folder = results / "default" / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "plan.json").write_text('{\n "schema": 2,\n "world": 2\n}\n')
    return folder


def begin(run: Path, attempt: int = 0, **launched: Any) -> Path:
    """Begins an attempt: this process started its ranks, unless something else is told."""
    folder = file_names.attempt_dir(run, attempt)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    records.event(run, attempt, "launch_started", **{**provenance.myself(), **launched})
    for rank in range(2):
        beat(folder, rank)
    return folder


def beat(folder: Path, rank: int, age_s: float = 0.0) -> None:
    """Lets a rank's heart have beaten some time ago."""
    file = alive_file(folder, rank)
    file.parent.mkdir(exist_ok=True)
    file.touch()
    os.utime(file, (time.time() - age_s,) * 2)
    os.utime(folder / "events.jsonl", (time.time() - age_s,) * 2)


def steps(folder: Path, count: int, ranks: int = 2, step_s: float = 0.5) -> None:
    """Lets all ranks have recorded some steps, and their memory after the first."""
    lines = []
    for step in range(count):
        for rank in range(ranks):
            line = {"kind": "step", "rank": rank, "step": step, "step_s": step_s / (rank + 1)}
            lines.append({**line, "loss": 2.30258509, "data_s": 0.0})
        if step == 0:
            lines += [
                {"kind": "memory", "rank": r, "peak_bytes": (r + 1) << 28} for r in range(ranks)
            ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def end(folder: Path, state: str, **values: Any) -> None:
    """Ends an attempt."""
    told = {"state": state, "cause": None, "reason": None, "exit_codes": {}, **values}
    (folder / "exit.json").write_text(json.dumps(told))


def done(run: Path, attempt: int = 0) -> None:
    """Makes the record of a run that is complete."""
    record = {"state": "done", "attempt": attempt, "throughput": {"img_per_s": {"median": 41.5}}}
    record |= {"memory": [{"peak_bytes": 1 << 29}, {"peak_bytes": 3 << 29}]}
    (run / "record.json").write_text(json.dumps(record))
    end(file_names.attempt_dir(run, attempt), "done")


def submitted(run: Path, attempt: int = 0, job: str = "77", index: int | None = None) -> Path:
    """Submits an attempt to Slurm."""
    folder = file_names.attempt_dir(run, attempt)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    told = {"launcher": "slurm", "job": job, "index": index, "submitted": time.time()}
    (folder / "job.json").write_text(json.dumps(told))
    return folder


def saved_with(shapes: dict[str, list[int]], folder: Path) -> Path:
    """Makes a checkpoint after one step whose tensors are zeros of these shapes."""
    return saved_stages([shapes], folder)


def saved_stages(
    stages: list[dict[str, list[int]]], folder: Path, step: int = 1, attempt: int = 0
) -> Path:
    """Makes a checkpoint whose stages have tensors, zeros of these shapes."""
    path, files = checkpoints.place(folder, step), {}
    path.mkdir(parents=True)
    for number, shapes in enumerate(stages):
        data = save({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
        name = f"stage{number:02d}.safetensors"
        (path / name).write_bytes(data)
        files[name] = checkpoints.StoredFile(len(data), hashlib.sha256(data).hexdigest(), shapes)
    made = checkpoints.Checkpoint(path, step, attempt, files)
    (path / checkpoints.MANIFEST).write_text(made.manifest())
    return path
