"""Is a wrong answer seen as wrong?"""

from __future__ import annotations

import pytest
import torch

from hires.bench.contestants import Options, line_up
from hires.bench.runners import HiresSteps, RankRunner, _error, build


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([2.0, 4.0], [3.0], 0.0),  # losses of two replicas: their mean counts
        ([3.3], [3.0], 0.1),
        ([float("nan")], [3.0], float("inf")),
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[1.0, 2.0], [1.0, 1.0]], [[1.0, 2.0]], 0.5),  # two tiles: the second one is wrong
        ([[1.0, 2.0]], [[1.0, 2.0], [1.0, 2.0]], float("inf")),  # an image is missing
    ],
)
def test_error_is_relative_to_the_largest_value(found, expected, error):
    got = _error(torch.tensor(found), torch.tensor(expected))
    assert got == pytest.approx(error, abs=1e-6)


def test_rank_that_is_not_in_builds_nothing():
    row = next(iter(line_up(Options(model="resnet18", image=[32, 32]), "infer")))
    assert build(row, 1) is None


class Quadratic:
    """Stands in for a network: its parameter moves with every step unless it stands still."""

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.parameters = [self.weight]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)

    def step(self):
        self.weight.square().sum().backward()
        self.optimizer.step()


def test_standing_still_keeps_weights_and_tidying_drops_gradients():
    runner = RankRunner(Quadratic(), threads=1)
    runner.prepare()
    runner.step()
    moved = runner.steps.weight.item()
    assert moved != 1
    runner.stand_still()
    runner.step()
    assert runner.steps.weight.item() == moved
    runner.tidy()
    assert runner.steps.weight.grad is None


def test_hires_repeats_its_microbatches(monkeypatch):
    # One process needs no transport.
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    row = next(iter(line_up(Options(model="resnet18", image=[32, 32]), "infer")))
    steps = HiresSteps(row.config, row.plan, 0)
    assert torch.equal(steps.step(), steps.step())
