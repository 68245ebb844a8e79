"""Does a divided update compute the bits of the whole one, with a part of its state?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hires.core.errors import PREEMPTED
from hires.core.store import checkpoints, file_names
from hires.core.store.reading import read_lines
from hires.engine.footprint import footprint
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.saved import attempt, losses, make, mean_losses

pytestmark = pytest.mark.dist

SHARD = {"shard": True, "exchange": "broadcast"}
SCATTER = {"shard": True, "exchange": "scatter"}
FP32: dict[str, Any] = {"precision": {"name": "fp32"}}


def test_divided_update_has_the_same_bits(tmp_path: Path):
    # Shares of a sum are added in the order of ranks, however they are divided.
    keys = {"precision": {"name": "fp16"}, "parallel": {"tiles": [2, 1], "replicas": 2}}
    runs = []
    for name, update in (("whole", {}), ("divided", SHARD), ("scattered", SCATTER)):
        run = make(tmp_path / name, optimizer=update, checkpoint={"every": 4}, batch=4, **keys)
        assert set(attempt(run)) == {0}
        runs.append(run)
    whole, *others = (losses(run, 0) for run in runs)
    assert all(other == whole for other in others)
    saved = [load_file(checkpoints.place(run, 8) / "stage00.safetensors") for run in runs]
    for other in saved[1:]:
        assert all(saved[0][name].equal(other[name]) for name in saved[0])


@pytest.mark.parametrize("update", [SHARD, SCATTER], ids=["broadcast", "scatter"])
def test_divided_state_is_saved_by_rows_and_resumes_bit_for_bit(update, tmp_path: Path):
    keys = {**FP32, "batch": 4, "parallel": {"replicas": 2}, "optimizer": update}
    whole = make(tmp_path / "whole", **keys)
    attempt(whole)
    stopped = make(tmp_path / "stopped", **keys)
    assert set(attempt(stopped, stop_at=4)) == {PREEMPTED}
    folder = checkpoints.place(stopped, 4)
    parts = [load_file(folder / f"momentum00.{rank:03d}.safetensors") for rank in range(2)]
    sizes = [sum(t.numel() for t in part.values()) for part in parts]
    assert max(sizes) <= 0.55 * sum(sizes)
    assert not (folder / "momentum00.safetensors").exists()
    assert set(attempt(stopped)) == {0}
    assert losses(stopped, 0, 1) == losses(whole, 0)


def test_gradients_are_scattered_in_a_type_of_messages(tmp_path: Path):
    keys = {**FP32, "batch": 4, "parallel": {"replicas": 2}, "comm": {"dtype": "bf16"}}
    found = []
    for name, update in (("whole", {}), ("scattered", SCATTER)):
        run = make(tmp_path / name, optimizer=update, **keys)
        assert set(attempt(run)) == {0}
        found.append(mean_losses(run, 0))
    assert found[0] == found[1]  # a sum of two rounded numbers has one result


def test_state_is_predicted_and_measured_as_a_part(tmp_path: Path):
    keys = {**FP32, "batch": 4, "steps": 3, "parallel": {"replicas": 2}}
    sizes = []
    for name, update in (("whole", {}), ("divided", SHARD)):
        run = make(tmp_path / name, optimizer=update, **keys)
        assert set(attempt(run)) == {0}
        lines = read_lines(file_names.attempt_dir(run, 0) / "metrics.jsonl")
        held = [line.get("optimizer_bytes", 0) for line in lines if line["rank"] == 0]
        config = config_of(optimizer=update, **keys)
        predicted = footprint(config, plan_of(config))[0].optimizer_bytes
        sizes.append((max(held), predicted))
    (whole, _), (part, predicted) = sizes
    assert part <= 0.55 * whole
    assert predicted == part
