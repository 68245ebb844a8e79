"""Layouts train step by step as torch's own optimisers and schedules do in one process.

They do so through a preemption, after which the run goes on: its losses have the bits that they
have without one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from hires.core.errors import PREEMPTED
from hires.core.store import checkpoints
from hires.core.store.attempts import Attempt
from tests.helpers.parity_rows import Row, on_each, rows
from tests.helpers.plain_training import plain_training, torch_rates
from tests.helpers.saved import attempt, config_at, losses, make, mean_losses

pytestmark = pytest.mark.dist

SCHEDULE = {"name": "one_cycle", "warmup": 1, "steps": 4}


@pytest.mark.parametrize("row", on_each(rows("training")))
def test_training_equals_that_of_torch_and_resumes(row: Row, device: str, tmp_path: Path):
    keys = {**row.keys, "steps": 4, "lr_schedule": SCHEDULE, "checkpoint": {"every": 4}}
    keys["device"] = device
    run = make(tmp_path / "whole", **keys)
    assert set(attempt(run)) == {0}
    stopped = make(tmp_path / "stopped", **keys)
    assert set(attempt(stopped, stop_at=2)) == {PREEMPTED}
    assert set(attempt(stopped)) == {0}
    assert losses(stopped, 0, 1) == losses(run, 0)
    tensors = [tensors_of(checkpoints.place(path, 4)) for path in (run, stopped)]
    assert tensors[0].keys() == tensors[1].keys()
    assert [name for name in tensors[0] if not tensors[0][name].equal(tensors[1][name])] == []

    if row.name.startswith("dropout"):  # plain torch draws other masks
        return
    plain = plain_training(config_at(run))
    assert mean_losses(run, 0) == pytest.approx(plain.losses, rel=1e-10)
    lines = Attempt(run, 0).metrics
    steps = [line for line in lines if line["kind"] == "step" and line["rank"] == 0]
    assert [step["lr"] for step in steps] == pytest.approx(torch_rates(config_at(run)))
    expected = {f"stage/{name}": tensor for name, tensor in plain.parameters.items()}
    if config_at(run).optimizer.ema is not None:
        expected |= {f"ema/{name}": tensor for name, tensor in plain.means.items()}
    for name, tensor in expected.items():
        largest = max(float(tensor.abs().max()), 1.0)
        assert float((tensors[0][name] - tensor).abs().max()) < 1e-10 * largest, name


@pytest.mark.parametrize("name", ["dp", "scattered, dp", "published, sp+gems"])
def test_training_with_codes_resumes_bit_by_bit(name: str, tmp_path: Path):
    """What topk left of the gradients of each rank is a part of the checkpoint."""
    keys = {**rows()[name].keys, "steps": 4, "checkpoint": {"every": 4}}
    keys["comm"] = {"codec": {"gradient": "topk", "parameters": "int8", "halo": "bf16"}}
    run, stopped = make(tmp_path / "whole", **keys), make(tmp_path / "stopped", **keys)
    assert set(attempt(run)) == {0}
    assert set(attempt(stopped, stop_at=2)) == {PREEMPTED}
    assert set(attempt(stopped)) == {0}
    tensors = [tensors_of(checkpoints.place(path, 4)) for path in (run, stopped)]
    left = [key for key in tensors[0] if key.startswith("gradient_left")]
    assert any(tensors[0][key].abs().max() > 0 for key in left)
    assert tensors[0].keys() == tensors[1].keys()
    assert [key for key in tensors[0] if not tensors[0][key].equal(tensors[1][key])] == []


def tensors_of(folder: Path) -> dict:
    """Returns the tensors of a checkpoint as ``kind/name``; of a divided state by its rank."""
    found = {}
    for path in folder.glob("*.safetensors"):
        rank = path.name.split(".")[1:-1]
        kind = "/".join([path.name.partition(".")[0].rstrip("0123456789"), *rank])
        found |= {f"{kind}/{name}": tensor for name, tensor in load_file(path).items()}
    return found
