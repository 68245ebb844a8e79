"""A row is compared element by element with one process before it is timed.

A gradient that is doubled, zero or of the other sign is found, and so is a wrong output in bf16;
each against one process.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from hires.bench.bench_rows import BenchRow, PeerSteps, planned, with_small
from hires.bench.check import (
    EXACT_TOLERANCE,
    LOWER_TOLERANCE,
    FirstStepCheck,
    parts_of,
    small_limit,
    worst,
)
from hires.bench.peers.peer_hires import HiresSteps
from hires.engine.device import RankDevice
from tests.helpers.layouts import config_of

NAN = float("nan")
SMALL = {"model": {"name": "preact_resnet", "depth": 11, "classes": 10}, "data": {"classes": 10}}
SMALL |= {"image": [32, 32], "batch": 2, "optimizer": {"lr": 0.0}}


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """Returns a function: the verdict on a row of one rank, whose tensors a function may spoil."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    plain = HiresSteps.tensors

    def judge(wrong=lambda tensors: None, **keys):
        def spoilt(self):
            tensors = {name: tensor.clone() for name, tensor in plain(self).items()}
            wrong(tensors)
            return tensors

        monkeypatch.setattr(HiresSteps, "tensors", spoilt)
        [row] = with_small([planned(BenchRow("row", config_of(**{**SMALL, **keys})))])
        return FirstStepCheck(0, RankDevice())(row, HiresSteps(row, 0, RankDevice()))

    yield judge
    dist.destroy_process_group()


def test_wrong_gradient_is_found_and_a_right_row_passes(verdict):
    right = verdict()
    assert right["ok"]
    assert right["exact"] < 1e-10

    def gradients(tensors):
        return [tensor for name, tensor in tensors.items() if name.startswith("gradients/")]

    for factor in (0.0, 2.0, -1.0):
        wrong = verdict(lambda ts, f=factor: [one.mul_(f) for one in gradients(ts)])
        assert not wrong["ok"]
        assert wrong["exact"] >= 1.0 - 1e-9
        assert wrong["value"] < 1e-5  # the loss does not show it

    def one_element(tensors):
        gradient = max(gradients(tensors), key=torch.numel)
        gradient[gradient.abs() == gradient.abs().max()] *= 2

    assert not verdict(one_element)["ok"]
    assert not verdict(lambda tensors: tensors.popitem())["ok"]  # of no rank


def test_wrong_output_in_bf16_is_found(verdict):
    low = {"task": {"name": "infer"}, "precision": {"name": "bf16"}}
    right = verdict(**low)
    assert right["ok"]
    assert right["exact"] < 1e-10  # its layout in float64, however deep the network
    for factor in (0.0, 2.0):
        assert not verdict(lambda ts, f=factor: [one.mul_(f) for one in ts.values()], **low)["ok"]


def test_reference_is_that_of_the_weights_integers(monkeypatch):
    given = {"task": {"name": "infer"}, "precision": {"name": "int8"}}
    step = lambda config, plan: {"output/0": config.quant.weights}  # noqa: E731
    monkeypatch.setattr("hires.bench.check.quantised_step", step)
    check = FirstStepCheck(0, RankDevice())
    for weights in ("int8", "int7"):
        row = BenchRow("row", config_of(quant={"weights": weights}, **given), plan=object())
        assert check._small_reference(row) == {"output/0": weights}


def test_limits_are_those_of_the_precision():
    row = planned(BenchRow("row", config_of(**SMALL)))
    assert small_limit(row) == EXACT_TOLERANCE <= 1e-6
    assert LOWER_TOLERANCE < 1.0  # zero or doubled outputs


@pytest.mark.parametrize(
    ("values", "mean_square", "error"),
    [
        ([3.0, 4.0], False, 0.0),
        ([3.0, 3.0], False, 0.25),  # over the largest expected value
        ([3.0, 3.0], True, 0.2),  # roots of mean squares: 1 over 5
        ([NAN, 4.0], False, math.inf),
        ([NAN, 4.0], True, math.inf),
        ([3.0, 4.0, 5.0], True, math.inf),
    ],
)
def test_error_is_that_of_the_worst_element(values, mean_square, error):
    row = BenchRow("row", config_of(task={"name": "infer"}))
    runner = PeerSteps(row, 0, RankDevice())
    runner.step = lambda: setattr(runner, "values", [torch.tensor(values)])
    whole = {"output/0": torch.tensor([3.0, 4.0])}
    parts = parts_of(runner, whole, mean_square=mean_square)
    assert parts["output/0"] == pytest.approx((error, 1.0))


def test_error_of_all_ranks_is_that_of_the_worst_and_what_no_rank_has_is_wrong():
    whole, half = (1e-12, 1.0), (0.0, 0.5)
    assert worst([{"a": whole}, {"b": (0.0, 1.0)}], ["a", "b"]) == 1e-12  # two stages
    assert worst([{"a": half}, {"a": half}], ["a"]) == 0.0  # two tiles
    assert worst([{"a": half}, {"a": (0.5, 0.5)}], ["a"]) == 0.5
    assert worst([{"a": half}, {}], ["a"]) == math.inf  # a tile is missing
    assert worst([{"a": whole}], ["a", "b"]) == math.inf
