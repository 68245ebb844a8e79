"""A row is compared element by element with one process before it is timed.

A gradient that is doubled, zero or of the other sign is found, and so is a wrong output in bf16;
each against one process.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from hires.bench.bench_rows import BenchRow, planned, with_small
from hires.bench.check import (
    EXACT_TOLERANCE,
    LOWER_TOLERANCE,
    FirstStepCheck,
    gradient_error,
    small_limit,
    value_error,
)
from hires.bench.peers import peer_hires
from hires.engine.device import RankDevice
from tests.helpers.layouts import config_of

NAN = float("nan")
SMALL = {"model": {"name": "preact_resnet", "depth": 11, "classes": 10}, "data": {"classes": 10}}
SMALL |= {"image": [32, 32], "batch": 2, "optimizer": {"lr": 0.0}}


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """Returns a function: the verdict on a row of one rank, whose steps a function may spoil."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    plain = peer_hires.HiresSteps.step

    def judge(wrong=None, **keys):
        step = plain if wrong is None else lambda self: wrong(self, plain(self))
        monkeypatch.setattr(peer_hires.HiresSteps, "step", step)
        [row] = with_small([planned(BenchRow("row", config_of(**{**SMALL, **keys})))])
        return FirstStepCheck(0, RankDevice())(row, peer_hires.build(row, 0, RankDevice()))

    yield judge
    dist.destroy_process_group()


def test_wrong_gradient_is_found_and_a_right_row_passes(verdict):
    right = verdict()
    assert right["ok"]
    assert right["exact"] < 1e-10

    def scaled(factor):
        def scale(steps, value):
            for parameter in steps.parameters.values():
                parameter.grad.mul_(factor)
            return value

        return scale

    for factor in (0.0, 2.0, -1.0):
        wrong = verdict(scaled(factor))
        assert not wrong["ok"]
        assert wrong["exact"] >= 1.0 - 1e-9
        assert wrong["value"] < 1e-5  # the loss does not show it

    def one_element(steps, value):
        gradient = max((p.grad for p in steps.parameters.values()), key=torch.numel)
        gradient[gradient.abs() == gradient.abs().max()] *= 2
        return value

    assert not verdict(one_element)["ok"]


def test_wrong_output_in_bf16_is_found(verdict):
    low = {"task": {"name": "infer"}, "precision": {"name": "bf16"}}
    right = verdict(**low)
    assert right["ok"]
    assert right["exact"] < 1e-10  # its layout in float64, however deep the network
    for factor in (0.0, 2.0):
        assert not verdict(lambda _, value, f=factor: value * f, **low)["ok"]


def test_limits_are_those_of_the_precision():
    row = planned(BenchRow("row", config_of(**SMALL)))
    assert small_limit(row) == EXACT_TOLERANCE <= 1e-6
    assert LOWER_TOLERANCE < 1.0  # zero or doubled outputs


@pytest.mark.parametrize(
    ("parts", "expected", "error"),
    [
        ([[2.0], [4.0]], [3.0], 0.0),  # losses of two replicas: their mean counts
        ([[3.3]], [3.0], 0.1),
        ([[NAN]], [3.0], math.inf),
        ([None, [3.0]], [3.0], 0.0),  # only the last stage has the loss
        ([None, None], [3.0], math.inf),
        ([[[1.0, 2.0]]], [[1.0, 2.0]], 0.0),
        ([[[1.0, 2.0]], [[1.0, 1.0]]], [[1.0, 2.0]], 0.5),  # two copies: the second one is wrong
        ([[[1.0, 2.0]], [[4.0, 4.0]]], [[1.0, 2.0], [4.0, 3.0]], 0.25),  # two replicas
        ([[[1.0, 2.0]]], [[1.0, 2.0], [1.0, 2.0]], math.inf),  # an image is missing
        ([[[[[1.0], [2.0]]]], [[[[3.0], [5.0]]]]], [[[[1.0, 3.0], [2.0, 4.0]]]], 0.25),  # columns
    ],
)
def test_error_of_a_value_is_that_of_the_worst_part(parts, expected, error):
    tensors = [None if part is None else torch.tensor(part) for part in parts]
    assert value_error(tensors, torch.tensor(expected)) == pytest.approx(error, abs=1e-6)


def test_error_of_gradients_is_that_of_the_worst_parameter():
    assert gradient_error([{"a": 1e-12}, {"b": 0.0}], ["a", "b"]) == 1e-12  # two stages
    assert gradient_error([{"a": 0.0, "b": 0.0}, {"b": 0.5}], ["a", "b"]) == 0.5  # half of a sum
    assert gradient_error([{"a": 0.0}], ["a", "b"]) == math.inf  # no rank has one of b
