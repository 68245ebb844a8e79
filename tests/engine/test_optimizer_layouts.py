"""Do layouts train as torch's own optimisers do in one process, and resume bit for bit?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hires.core.errors import PREEMPTED
from hires.core.store import checkpoints, file_names
from hires.core.store.reading import read_lines
from tests.helpers.layouts import verified
from tests.helpers.plain_training import plain_training, torch_rates
from tests.helpers.saved import attempt, config_at, losses, make, mean_losses

pytestmark = pytest.mark.dist

GEMS = {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"parallel": {"microbatches": 2}},
    "sp": {"parallel": {"tiles": [2, 1]}},
    "lp": {"parallel": {"stages": 2}},
    "pp": {"parallel": {"stages": 2, "microbatches": 2}},
    "sp+pp": {"parallel": {"tiles": [2, 1], "stages": 2, "microbatches": 2}},
    "sp+gems": {"batch": 4, "parallel": GEMS},
    "dp": {"parallel": {"replicas": 2}},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05, "betas": [0.8, 0.9]},
    "adam": {"name": "adam", "lr": 1e-3, "eps": 1e-3},
    "nesterov": {"nesterov": True},
}
CASES = [(layout, "adamw", {}) for layout in LAYOUTS]
SCHEDULE = {"name": "one_cycle", "warmup": 1, "steps": 4}
CASES += [("sp+gems", "adam", {"shard": True, "exchange": "broadcast"})]
CASES += [("dp", "adamw", {"shard": True, "exchange": "scatter"}), ("sp", "nesterov", {})]


def ids(case: Any) -> str:
    return case if isinstance(case, str) else case.get("exchange", "whole")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "name", "update"), CASES, ids=ids)
def test_training_equals_that_of_torch(layout, name, update, tmp_path: Path):
    # eps far above what noise in a gradient of 0 may be: Adam divides a gradient by its own size,
    # so that noise alone would decide where a bias before a norm moves.
    keys = {"optimizer": {"eps": 1e-3, **OPTIMIZERS[name], **update}, "steps": 4}
    keys["lr_schedule"] = SCHEDULE
    if name == "nesterov":
        del keys["optimizer"]["eps"]
    run = make(tmp_path, **keys, **LAYOUTS[layout], checkpoint={"every": 4})
    assert set(attempt(run)) == {0}
    plain = plain_training(config_at(run))
    assert mean_losses(run, 0) == pytest.approx(plain.losses, rel=1e-10)
    lines = read_lines(file_names.attempt_dir(run, 0) / "metrics.jsonl")
    rates = [line["lr"] for line in lines if line["kind"] == "step" and line["rank"] == 0]
    assert rates == pytest.approx(torch_rates(config_at(run)))
    held = {}
    for path in checkpoints.place(run, 4).glob("stage*.safetensors"):
        held |= load_file(path)
    for key, tensor in plain.parameters.items():
        largest = float(tensor.abs().max())
        assert float((held[key] - tensor).abs().max()) < 1e-10 * max(largest, 1.0), key


def test_step_of_adam_is_verified(tmp_path: Path):
    keys = {"optimizer": OPTIMIZERS["adam"], "parallel": {"tiles": [2, 1]}}
    answer = verified(tmp_path, **keys)
    assert answer["ok"], answer["worst"]
    assert answer["errors"]["parameters"] < 1e-10


@pytest.mark.sampled(1)
@pytest.mark.parametrize("update", [{}, {"shard": True, "exchange": "scatter"}], ids=ids)
def test_adam_resumes_bit_for_bit(update, tmp_path: Path):
    keys: dict[str, Any] = {
        "precision": {"name": "fp32"},
        "parallel": {"replicas": 2},
        "optimizer": {**OPTIMIZERS["adamw"], **update},
    }
    whole = make(tmp_path / "whole", **keys)
    attempt(whole)
    stopped = make(tmp_path / "stopped", **keys)
    assert set(attempt(stopped, stop_at=4)) == {PREEMPTED}
    names = {path.name.partition(".")[0] for path in checkpoints.place(stopped, 4).iterdir()}
    assert {"stage00", "exp_avg00", "exp_avg_sq00"} <= names
    assert set(attempt(stopped)) == {0}
    assert losses(stopped, 0, 1) == losses(whole, 0)
