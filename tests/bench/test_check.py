"""A row is compared element by element with one process before it is timed.

A gradient that is doubled, zero or of the other sign is found, and so are wrong bits of int8 and a
wrong output in bf16; each against one process of its own precision.
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
    Deviation,
    FirstStepCheck,
    gradient_error,
    small_limit,
    value_error,
)
from hires.bench.peers import peer_hires
from hires.engine.device import RankDevice
from tests.helpers.layouts import config_of

NAN = float("nan")
SMALL = {"model": {"name": "preact_resnet", "n": 1, "classes": 10}, "data": {"classes": 10}}
SMALL |= {"image": [32, 32], "batch": 2, "optimizer": {"lr": 0.0}}


@pytest.fixture
def alone(tmp_path):
    """A world of one rank for torch.distributed."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def verdict(row, wrong=None, monkeypatch=None):
    """Returns the deviation of a row whose steps a function spoils."""
    plain = peer_hires.HiresSteps.step
    if wrong is not None:
        monkeypatch.setattr(peer_hires.HiresSteps, "step", lambda self: wrong(self, plain(self)))
    [row] = with_small([planned(row)])
    runner = peer_hires.build(row, 0, RankDevice())
    return FirstStepCheck(0, RankDevice())(row, runner)


@pytest.mark.parametrize("factor", [0.0, 2.0, -1.0])
def test_wrong_gradient_is_found(alone, monkeypatch, factor):
    def scaled(steps, value):
        for parameter in steps.parameters.values():
            parameter.grad.mul_(factor)
        return value

    deviation = verdict(BenchRow("single", config_of(**SMALL)), scaled, monkeypatch)
    assert not deviation.ok
    assert deviation.gradient >= 1.0 - 1e-9
    assert deviation.value < 1e-5  # the loss does not show it


def test_single_doubled_element_is_found_and_a_right_row_passes(alone, monkeypatch):
    row = BenchRow("single", config_of(**SMALL))
    right = verdict(row)
    assert right.ok
    assert max(right.exact, right.gradient) < 1e-10

    def one_element(steps, value):
        gradient = max((p.grad for p in steps.parameters.values()), key=torch.numel)
        gradient[gradient.abs() == gradient.abs().max()] *= 2
        return value

    assert not verdict(row, one_element, monkeypatch).ok


def test_wrong_output_in_bf16_is_found(alone, monkeypatch):
    low = {**SMALL, "task": {"name": "infer"}, "precision": {"name": "bf16"}}
    row = BenchRow("bf16", config_of(**low))
    assert verdict(row).ok
    for factor in (0.0, 2.0):
        assert not verdict(row, lambda _, value, f=factor: value * f, monkeypatch).ok
        monkeypatch.undo()


def test_limits_are_those_of_the_precision():
    def limit(**keys):
        return small_limit(planned(BenchRow("row", config_of(**{**SMALL, **keys}))))

    assert limit() == EXACT_TOLERANCE <= 1e-6
    assert not Deviation(1.0, value_limit=LOWER_TOLERANCE).ok  # zero or doubled outputs
    assert 1e-3 < limit(precision={"name": "bf16"}, task={"name": "infer"}) <= 0.4


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


@pytest.mark.parametrize(
    ("ranks", "error"),
    [
        ([{"a": 1e-12}, {"b": 0.0}], 1e-12),  # two stages
        ([{"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.5}], 0.5),  # a tile has half of a sum
        ([{"a": 0.0}], math.inf),  # no rank has a gradient of b
    ],
)
def test_error_of_gradients_is_that_of_the_worst_parameter(ranks, error):
    assert gradient_error(ranks, ["a", "b"]) == error
    assert Deviation(0.0, 0.0, error).ok == (error < EXACT_TOLERANCE)
