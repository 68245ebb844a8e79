"""Does the loss scale of fp16 follow torch's, alike on all ranks, and survive a checkpoint?"""

from __future__ import annotations

import random

import pytest
import torch

from hires.core.errors import LossError
from hires.core.store import checkpoints, file_names, records
from hires.core.store.reading import read_lines
from hires.parallel import loss_scale
from hires.parallel.loss_scale import MOST_SKIPPED, LossScale
from tests.engine.test_continued_run import saved
from tests.helpers.plain_training import plain_training
from tests.helpers.saved import attempt, config_at, make, mean_losses

STEEP = {
    "image": [18, 14],
    "batch": 4,
    "steps": 6,
    "model": {"name": "custom", "target": "tests.helpers.custom_nets:Steep", "classes": 4},
    "precision": {"name": "fp16", "scale_interval": 2},
}
LAYOUTS = {
    "tiles": {"tiles": [2, 1]},
    "stages": {"stages": 2, "microbatches": 2},
    "replicas": {"replicas": 2},
}


@pytest.fixture
def alone(monkeypatch):
    """There is one rank, without a transport."""
    monkeypatch.setattr(loss_scale, "max_all", lambda number: number)


def test_scale_follows_that_of_torch(alone):
    # Overflows at random; the gradients are unscaled and checked by both.
    ours, theirs = LossScale(3), torch.amp.GradScaler("cpu", growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    moved, draws = parameter.detach().clone(), random.Random(0)
    for _ in range(60):
        gradient = torch.full((5,), draws.choice([1.0, 3.0, 1e38, float("nan")]))
        theirs.scale(torch.zeros(1))  # begins a step
        assert theirs.get_scale() == ours.scale
        parameter.grad = gradient * ours.scale
        own = gradient * ours.scale
        ours.agree([own])
        theirs.step(optimizer)
        theirs.update()
        if not ours.skips:
            assert torch.equal(own, parameter.grad)
            moved -= 0.5 * own
        ours.update()
        assert torch.equal(moved, parameter.detach())
    assert ours.scale < 2.0**16


def test_scale_never_leaves_the_range_of_fp32(alone):
    ours = LossScale(1)
    ours.scale = 2.0**126
    for _ in range(3):
        ours.agree([torch.zeros(2)])
        ours.update()
    assert ours.scale == 2.0**127


def test_fixed_scale_stays_and_skips(alone):
    ours = LossScale(1, fixed=512.0)
    for value, skips in ((1.0, False), (float("inf"), True), (1.0, False)):
        ours.agree([torch.full((2,), value)])
        ours.update()
        assert (ours.skips, ours.scale) == (skips, 512.0)


def test_restored_count_beyond_the_interval_doubles_the_scale(alone):
    ours = LossScale(5)
    ours.restore(torch.tensor([512.0, 8, 0], dtype=torch.float64))  # of an older version
    ours.agree([torch.zeros(2)])
    ours.update()
    assert (ours.scale, ours.good_steps, ours.skipped) == (1024.0, 0, 0)


def test_skipped_steps_are_counted_beyond_a_checkpoint(alone):
    ours = LossScale(5)
    for value in (float("inf"), 1.0, float("inf")):
        ours.agree([torch.full((2,), value)])
        ours.update()
    later = LossScale(5)
    later.restore(ours.state())
    assert (later.skipped, later.scale, later.skipped_in_row) == (2, 2.0**14, 1)


def test_network_that_always_overflows_ends_the_run(alone):
    ours = LossScale(2000)
    for _ in range(MOST_SKIPPED):
        ours.require_progress()
        ours.agree([torch.full((2,), float("inf"))])
        ours.update()
    with pytest.raises(LossError, match="precision=bf16"):
        ours.require_progress()


def test_rank_whose_own_gradients_are_finite_skips_with_the_others(monkeypatch):
    monkeypatch.setattr(loss_scale, "max_all", lambda number: 1)
    ours = LossScale(2000)
    ours.agree([torch.ones(2)])
    assert ours.skips


def scales(run, number=0):
    """The scale of every step and whether it was skipped, by rank."""
    found: dict[int, dict[int, tuple[float, bool]]] = {}
    for line in read_lines(file_names.attempt_dir(run, number) / "metrics.jsonl"):
        if line["kind"] == "step":
            found.setdefault(line["rank"], {})[line["step"]] = line["loss_scale"], line["skipped"]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overflow_is_skipped_on_all_ranks_alike(layout, tmp_path):
    run = make(tmp_path, **STEEP, parallel=LAYOUTS[layout])
    assert attempt(run) == [0, 0]
    first, second = scales(run).values()
    assert first == second
    skipped = {step for step, (_, skips) in first.items() if skips}
    assert 0 in skipped
    assert len(skipped) < STEEP["steps"]
    for step in range(STEEP["steps"] - 1):
        (scale, skips), (later, _) = first[step], first[step + 1]
        assert later in ((scale / 2,) if skips else (scale, scale * 2))
    # The forward pass rounds about 10 times on its way: 4 * 2^-11 * sqrt(10) = 0.6 %. The gradients
    # are off by as much twice, and by sqrt(3 * 2^-11) = 4 % for ReLUs on the other side of zero; of
    # what the updates change, which is at most half of a loss here, that is another 2 %.
    plain = plain_training(config_at(run), skipped)
    assert mean_losses(run, 0) == pytest.approx(plain.losses, rel=0.03)
    record = records.read_record(run)
    assert record["skipped_steps"] == len(skipped)
    assert record["loss_scale"] == first[5][0]


def test_interrupted_run_goes_on_bitwise(tmp_path):
    every = {**STEEP, "parallel": LAYOUTS["tiles"], "checkpoint": {"every": 3}}
    whole, parts = make(tmp_path / "whole", **every), make(tmp_path / "parts", **every)
    assert attempt(whole) == [0, 0]
    assert attempt(parts, 3) == [75, 75]
    assert attempt(parts) == [0, 0]
    ours, theirs = saved(parts, 6), saved(whole, 6)
    assert ours.keys() == theirs.keys()
    scale, *counts = (checkpoints.read(checkpoints.place(run, 6)).numbers for run in (parts, whole))
    assert counts == [scale]
    assert len(scale["loss_scale"]) == 4
    for name, tensors in ours.items():
        assert all(torch.equal(tensor, theirs[name][key]) for key, tensor in tensors.items())
    together = {**scales(parts, 0)[0], **scales(parts, 1)[0]}
    assert together == scales(whole)[0]
    assert (
        records.read_record(parts)["skipped_steps"] == records.read_record(whole)["skipped_steps"]
    )
    assert checkpoints.saved_step(parts) == 6


def test_continued_run_counts_the_skips_of_the_run_before(tmp_path):
    whole = make(tmp_path / "whole", **STEEP)
    first = make(tmp_path / "parts", **{**STEEP, "steps": 3, "checkpoint": {"every": 3}})
    assert [attempt(whole), attempt(first)] == [[0], [0]]
    saving = {"every": 2, "continues": str(checkpoints.place(first, 3))}
    second = make(tmp_path / "parts", **{**STEEP, "checkpoint": saving})
    assert attempt(second, 5) == [75]  # so that the step before is another attempt's
    assert attempt(second) == [0]
    ours, theirs = records.read_record(second), records.read_record(whole)
    assert records.read_record(first)["skipped_steps"] > 0
    for key in ("skipped_steps", "loss_scale"):
        assert ours[key] == theirs[key]
