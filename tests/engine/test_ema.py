"""Is the running mean of the weights that of one process, kept, resumed and used?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hires.core.errors import PREEMPTED, ConfigError
from hires.core.store import checkpoints
from hires.core.store.network_weights import find_weights
from hires.engine.footprint import footprint
from hires.engine.weights_file import open_weights
from tests.engine.test_optimizer_layouts import LAYOUTS, ids
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.plain_training import plain_training
from tests.helpers.saved import attempt, config_at, make

pytestmark = pytest.mark.dist

EMA = {"ema": 0.75}
SCATTER = {"shard": True, "exchange": "scatter"}
CASES: list[tuple[str, dict[str, Any]]] = [("sp+pp", {}), ("sp+gems", {"shard": True})]
CASES += [("dp", SCATTER)]


def means(source: Path) -> dict[str, Tensor]:
    """Returns what ``weights=SOURCE/ema`` takes."""
    file = open_weights(f"{source}/ema")
    shapes = find_weights(f"{source}/ema").shapes()
    assert shapes == file.shapes
    made = {name: file.tensor(name) for name in shapes}
    assert all(list(tensor.shape) == shapes[name] for name, tensor in made.items())
    return made


@pytest.mark.parametrize(("layout", "update"), CASES, ids=ids)
def test_means_are_those_of_one_process(layout, update, tmp_path: Path):
    keys = {"optimizer": {**EMA, **update}, "steps": 4, "checkpoint": {"every": 4}}
    run = make(tmp_path, **keys, **LAYOUTS[layout])
    assert set(attempt(run)) == {0}
    plain, held = plain_training(config_at(run)), means(run)
    for name, mean in plain.means.items():
        largest = max(1.0, float(mean.abs().max()))
        assert float((held[name] - mean).abs().max()) < 1e-10 * largest, name
    assert not torch.equal(held["fc.weight"], open_weights(str(run)).tensor("fc.weight"))
    assert held.keys() == find_weights(str(run)).shapes().keys()  # also buffers


@pytest.mark.slow
def test_means_resume_bit_for_bit_and_begin_where_a_run_had_none(tmp_path: Path):
    keys: dict[str, Any] = {"precision": {"name": "fp32"}, "parallel": {"replicas": 2}}
    saving = {"checkpoint": {"every": 8}}
    whole = make(tmp_path / "whole", **keys, optimizer=EMA, **saving)
    attempt(whole)
    stopped = make(tmp_path / "stopped", **keys, optimizer=EMA, **saving)
    assert set(attempt(stopped, stop_at=4)) == {PREEMPTED}
    assert set(attempt(stopped)) == {0}
    ours, theirs = means(stopped), means(whole)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    none = make(tmp_path / "none", **keys, steps=2, checkpoint={"every": 2}, measure={"warmup": 0})
    attempt(none)
    with pytest.raises(ConfigError, match=r"holds no running means .* optimizer.ema=0.999"):
        find_weights(f"{none}/ema")
    later = {"resume": str(none), "every": 3}
    going = make(tmp_path / "going", **keys, steps=3, checkpoint=later, optimizer=EMA)
    assert set(attempt(going)) == {0}
    before, after = (
        open_weights(str(checkpoints.place(run, n))).tensor("fc.weight")
        for run, n in ((none, 2), (going, 3))
    )
    wanted = torch.lerp(before, after, 0.25)
    torch.testing.assert_close(means(going)["fc.weight"], wanted, rtol=1e-6, atol=1e-7)


def test_means_are_shown_and_taken_by_the_name_of_their_run(hires, tmp_path: Path):
    run = make(tmp_path, optimizer=EMA, steps=3, checkpoint={"every": 3})
    assert attempt(run) == [0]
    shown = hires("weights", "show", f"{run.name}/ema", "--results", str(tmp_path), "--json")
    assert shown.code == 0, shown.err
    tensors = json.loads(shown.out)["tensors"]
    assert tensors.keys() == find_weights(str(run)).shapes().keys()


def test_means_are_part_of_the_predicted_memory():
    sizes = []
    for update in ({}, EMA):
        config = config_of(optimizer=update)
        [memory] = footprint(config, plan_of(config))
        sizes.append(memory.optimizer_bytes)
    assert sizes[1] == 2 * sizes[0]
