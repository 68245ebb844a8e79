"""What counts as equal to one process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from hires.core.config.run_config import from_dict
from hires.engine import verify
from hires.engine.device import RankDevice
from hires.engine.verify import noises, reference_step, summary, words
from hires.engine.verify_bounds import BITWISE, EXACT, KINDS, LOWERED, lowers, tensor_error
from hires.nets.trace import trace
from tests.helpers.layouts import verified

GOOD = {"output/0": 1e-14, "loss/0": 0.0, "gradients/a.weight": 1e-13, "parameters/a.weight": 1e-15}


def test_largest_error_of_all_ranks_decides():
    others = [{"rank": rank, "errors": GOOD} for rank in (0, 2)]
    lines = [*others, {"rank": 1, "errors": {**GOOD, "gradients/a.weight": 2e-10}}, *others]
    answer = summary(lines, [*GOOD])
    assert answer["ok"] is False
    assert answer["max_rel_err"] == answer["errors"]["gradients"] == 2e-10
    assert list(answer["errors"]) == list(answer["worst"]) == list(KINDS)
    found = words(answer["worst"]["gradients"])
    assert found == "gradients/a.weight by 2.00e-10, allowed is 1e-10"


def test_tensor_that_no_rank_compared_is_wrong():
    # A gradient owned by nobody went unnoticed, since only what ranks held was looked at.
    answer = summary([{"rank": 0, "errors": GOOD}], [*GOOD, "gradients/b.weight"])
    assert answer["ok"] is False
    assert answer["errors"]["gradients"] == math.inf


@pytest.mark.parametrize(
    ("error", "noise", "verdict"),
    [
        (2e-9, 1e-10, "not equal"),
        (2e-9, 3e-10, "equal"),  # noise excuses ten times itself
        (2e-9, math.inf, "equal"),
        (2e-9, 0.0, "not equal"),
        # verify said NOT equal at an error of 3e-6 beside a noise of 8e-6: the limit of 1e-6 won.
        (3e-6, 8e-6, "undecided"),
        (3e-6, 1e-9, "not equal"),
    ],
)
def test_noise_excuses_up_to_a_limit_and_above_it_is_undecided(error, noise, verdict):
    errors = {**GOOD, "gradients/bias": error}
    lines, noises_of = [{"rank": 0, "errors": errors}], {"gradients/bias": noise}
    answer = summary(lines, [*errors], noises_of)
    assert (answer["verdict"], answer["ok"]) == (verdict, verdict == "equal")
    assert answer["by_noise"] == (["gradients/bias"] if verdict == "equal" else [])
    assert answer["undecided"] == (["gradients/bias"] if verdict == "undecided" else [])
    errors["output/0"] = 1e-9  # has no such noise: one wrong tensor decides
    answer = summary(lines, [*errors], noises_of)
    assert answer["verdict"] == "not equal"


def test_noise_of_a_network_that_amplifies_it_is_measured_by_several_draws(monkeypatch):
    # One draw of a chain of sin(5 y + 1) showed a tenth of what a layout differs by.
    class Chain(nn.Module):
        def forward(self, x):
            for _ in range(8):
                x = torch.sin(5 * x + 1)
            return x

    config, reference = _step_of(monkeypatch, net_of(nn.Conv2d(3, 8, 3), Chain()))
    clones = {n: t.clone() for n, t in reference.items()}
    draws = [noise["gradients/0.weight"] for noise in noises(config, RankDevice(), clones, EXACT)]
    assert draws == sorted(draws)
    assert draws[-1] > draws[0] > 1e-12
    # verify said NOT equal: the gradient of a bias before a norm is a sum of terms that cancel.
    net = net_of(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    config, reference = _step_of(monkeypatch, net)
    clones = {n: t.clone() for n, t in reference.items()}
    *_, noise = noises(config, RankDevice(), clones, EXACT)
    assert noise["gradients/0.bias"] > 0
    assert noise["gradients/0.weight"] < 1e-12


def _step_of(monkeypatch, net: nn.Module, batch: int = 4):
    config = from_dict({
        "image": 16, "batch": batch, "steps": 3, "precision": {"name": "fp64"},
        "data": {"classes": 4, "length": 16},
    })  # fmt: skip
    state = {name: value.clone() for name, value in net.state_dict().items()}

    def whole(config):
        net.load_state_dict(state)
        net.zero_grad(set_to_none=True)
        return net.double().train()

    monkeypatch.setattr(verify, "whole_model", whole)
    return config, reference_step(config, RankDevice())


def net_of(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


class Float32Mean(nn.Module):
    """As the attention of many networks: it sums in float32, whatever type it is given."""

    def forward(self, x):
        return x.float().mean((2, 3), keepdim=True).to(x.dtype) + x


def test_network_that_computes_in_float32_has_its_noise(monkeypatch):
    # EfficientViT and DINOv2 were "NOT equal": an ulp of float64 vanishes in their own float32.
    net = net_of(nn.Conv2d(3, 8, 3), Float32Mean())
    assert lowers(trace(net, [2, 3, 16, 16], training=True, dtype=torch.float64))
    assert not lowers(trace(net_of(), [2, 8, 16, 16], training=True, dtype=torch.float64))
    config, reference = _step_of(monkeypatch, net)
    clones = {n: t.clone() for n, t in reference.items()}
    *_, noise = noises(config, RankDevice(), clones, EXACT)
    assert max(noise.values()) < 1e-10
    *_, noise = noises(config, RankDevice(), clones, LOWERED)
    assert 1e-9 < noise["gradients/0.weight"] < 1e-6


@pytest.mark.parametrize("bounds", [EXACT, BITWISE])
def test_an_output_that_should_be_zero_and_is_not_is_wrong(bounds):
    # All of its kind are zero, so there is no scale that the error could be relative to.
    zeros, held = torch.zeros(3), torch.tensor([0.0, 5.0, 0.0])
    largest = {"output": 0.0}
    assert tensor_error(held, zeros, "output/0", largest, bounds) == 5
    assert tensor_error(zeros, zeros.clone(), "output/0", largest, bounds) == 0


@pytest.mark.parametrize("bounds", [EXACT, LOWERED])
def test_zero_but_for_rounding_is_compared_with_the_largest_of_its_kind(bounds):
    # A bias before a norm made a network NOT equal where its rounding was luckier in one process.
    largest = {"gradients": 1.0}
    zero, tiny = torch.tensor([3e-14, 0.0]), torch.tensor([1e-5, 0.0])
    assert tensor_error(zero + 1e-12, zero, "gradients/bias", largest, bounds) < 1e-10
    assert tensor_error(zero + 1e-9, zero, "gradients/bias", largest, bounds) > 1e-10
    assert tensor_error(tiny * (1 + 2e-4), tiny, "gradients/bias", largest, bounds) > 1e-6


@pytest.mark.dist
def test_bias_before_a_norm_of_a_large_map_is_equal(tmp_path: Path):
    model = {"name": "custom", "target": "tests.helpers.library_jobs:biased", "classes": 10}
    answer = verified(tmp_path, image=160, batch=8, model=model, parallel={"tiles": [2, 1]})
    assert answer["ok"], answer
