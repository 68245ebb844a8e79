"""Is a wrong answer seen as wrong?"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hires.bench.contestants import LayoutsOptions, line_up
from hires.bench.judge import RankAnswer, compare
from hires.bench.ranks import DevicePlace, run_ranks
from hires.bench.runners import HiresSteps, build
from hires.bench.timing import Runner
from hires.comm import opened_channels, use_channels
from tests.helpers import device_jobs
from tests.helpers.patience import PATIENCE_S

INF = float("inf")


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([[2.0], [4.0]], [3.0], 0.0),  # losses of two replicas: their mean counts
        ([[3.3]], [3.0], 0.1),
        ([[float("nan")]], [3.0], INF),
        ([None, [3.0]], [3.0], 0.0),  # only the last stage knows the loss
        ([None, None], [3.0], INF),
        ([[[1.0, 2.0]]], [[1.0, 2.0]], 0.0),
        ([[[1.0, 2.0]], [[1.0, 1.0]]], [[1.0, 2.0]], 0.5),  # two tiles: the second one is wrong
        ([[[1.0, 2.0]]], [[1.0, 2.0], [1.0, 2.0]], INF),  # an image is missing
    ],
)
def test_error_of_a_value_is_relative_to_the_largest(found, expected, error):
    answers = [RankAnswer(None if v is None else torch.tensor(v), torch.ones(1)) for v in found]
    verdict = compare(answers, torch.tensor(expected), torch.ones(1), [])
    assert verdict.value == pytest.approx(error, abs=1e-6)
    assert verdict.ok == (error < 1e-3)


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ([{"a": 1e-12}, {"b": 0.0}], 1e-12),  # two stages
        ([{"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.5}], 0.5),  # a tile has half of a sum
        ([{"a": 0.0}], INF),  # no rank has a gradient of b
    ],
)
def test_error_of_gradients_is_that_of_the_worst_parameter(found, error):
    value = torch.ones(1)
    answers = [RankAnswer(value, value, gradients) for gradients in found]
    verdict = compare(answers, value, value, ["a", "b"])
    assert verdict.gradient == error
    assert verdict.ok == (error < 1e-6)


# A gradient of the other sign has the same norm.
@pytest.mark.dist
@pytest.mark.parametrize("factor", [0.0, 2.0, -1.0])
def test_row_with_wrong_gradients_is_wrong(factor):
    small = {"model": "preact_resnet11", "image": [32, 32], "batch": 2}
    rows = line_up(LayoutsOptions(**small, device="cpu", only=("sp", "dp")), "train")
    run = [row for row in rows if row.name in ("module", "tiles 2x1", "dp", "ddp")]
    verdicts = run_ranks(device_jobs.rows_with_scaled_gradients, 2, PATIENCE_S, run, factor)
    right = {name for name, verdict in verdicts.items() if verdict.ok}
    assert right == {"module", "ddp"}  # those that are torch's own


def test_rank_that_is_not_in_builds_nothing():
    row = next(
        iter(line_up(LayoutsOptions(device="cpu", model="resnet18", image=[48, 48]), "infer"))
    )
    assert build(row, 1) is None


class Square(Runner):
    """Stands in for a network."""

    def __init__(self):
        self.parameters = {"weight": torch.nn.Parameter(torch.ones(1))}

    def step(self):
        self.seen_threads = torch.get_num_threads()
        self.parameters["weight"].square().sum().backward()


def test_step_has_its_threads_and_leaves_no_gradient():
    before = torch.get_num_threads()
    runner = Square()
    runner.threads = 3
    runner.prepare()
    runner.step()
    runner.tidy()
    torch.set_num_threads(before)
    assert runner.seen_threads == 3
    assert runner.parameters["weight"].grad is None


def test_hires_repeats_its_microbatches():  # one process needs no transport
    row = next(
        iter(line_up(LayoutsOptions(device="cpu", model="resnet18", image=[48, 48]), "infer"))
    )
    steps = HiresSteps(row.config, row.plan, 0)
    assert torch.equal(steps.step(), steps.step())


def test_every_plan_has_its_own_communicators(monkeypatch):
    # A world holds many plans at once; each numbers its channels from 1.
    made = iter(["of a", "of b"])

    def opens(*args, **named):
        use_channels(next(made))
        return SimpleNamespace(loaders=[], parameters={})

    monkeypatch.setattr("hires.bench.runners.build_rank", opens)
    config = SimpleNamespace(weights=None)
    a, b = (HiresSteps(config, None, 0) for _ in range(2))
    try:
        for steps, own in ((a, "of a"), (b, "of b"), (a, "of a")):
            steps.prepare()
            assert opened_channels() == own
    finally:
        use_channels(None)


@pytest.mark.slow
@pytest.mark.dist
def test_rows_compute_on_the_device_that_is_named():
    small = {"model": "preact_resnet11", "image": [32, 32], "batch": 2, "microbatches": 2}
    rows = line_up(LayoutsOptions(**small, device="simulated", only=("pp",)), "train")
    run = [row for row in rows if not row.not_run and row.name != "pp gpipe"]
    assert {row.kind for row in run} == {"hires", "module"}
    place = DevicePlace("simulated")
    kinds, verdicts = run_ranks(device_jobs.bench_rows, 2, PATIENCE_S, run, place=place)
    assert kinds == {row.name: {"simulated"} for row in run}
    assert all(verdict.ok for verdict in verdicts.values())


@pytest.mark.slow
@pytest.mark.dist
def test_shard_in_a_loop_computes_what_a_run_does():
    small = {"model": "preact_resnet11", "image": [32, 32], "batch": 2}
    rows = line_up(LayoutsOptions(**small, device="cpu", only=("sp",)), "train")
    run = [row for row in rows if row.kind == "shard"]
    _, verdicts = run_ranks(device_jobs.bench_rows, 2, PATIENCE_S, run)
    assert [verdict.ok for verdict in verdicts.values()] == [True]
    simulated = line_up(LayoutsOptions(**small, device="simulated", only=("sp",)), "train")
    [shard] = [row for row in simulated if row.kind == "shard"]
    assert "on the CPU alone" in shard.not_run
