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
    lines = [
        {"rank": 0, "errors": GOOD},
        {"rank": 1, "errors": {**GOOD, "gradients/a.weight": 2e-10}},
        {"rank": 2, "errors": GOOD},
    ]
    answer = summary(lines, [*GOOD])
    assert answer["ok"] is False
    assert answer["max_rel_err"] == answer["errors"]["gradients"] == 2e-10
    assert list(answer["errors"]) == list(answer["worst"]) == list(KINDS)
    assert words(answer["worst"]["gradients"]) == (
        "gradients/a.weight by 2.00e-10, allowed is 1e-10"
    )


def test_tensor_that_no_rank_compared_is_wrong():
    # A gradient owned by nobody went unnoticed, since only what ranks held was looked at.
    answer = summary([{"rank": 0, "errors": GOOD}], [*GOOD, "gradients/b.weight"])
    assert answer["ok"] is False
    assert answer["errors"]["gradients"] == math.inf


@pytest.mark.parametrize(("noise", "ok"), [(1e-10, False), (3e-10, True), (math.inf, True)])
def test_noise_excuses_ten_times_itself(noise, ok):
    errors = {**GOOD, "gradients/bias": 2e-9}
    answer = summary([{"rank": 0, "errors": errors}], [*errors], {"gradients/bias": noise})
    assert answer["ok"] is ok
    assert answer["by_noise"] == (["gradients/bias"] if ok else [])


def test_noise_never_excuses_what_is_wrong():
    errors = {**GOOD, "gradients/bias": 2e-6}
    assert not summary([{"rank": 0, "errors": errors}], [], dict.fromkeys(errors, 1.0))["ok"]
    errors = {**GOOD, "gradients/other": 2e-10}
    assert not summary([{"rank": 0, "errors": errors}], [], {"gradients/bias": 1.0})["ok"]


def test_error_within_a_noise_above_the_limit_is_undecided():
    # verify said NOT equal at an error of 3e-6 beside a noise of 8e-6: the limit of 1e-6 won.
    errors = {**GOOD, "gradients/a.weight": 3e-6}
    lines, noise = [{"rank": 0, "errors": errors}], {"gradients/a.weight": 8e-6}
    answer = summary(lines, [*errors], noise)
    assert (answer["verdict"], answer["ok"]) == ("undecided", False)
    assert answer["undecided"] == [answer["decisive"]["name"]] == ["gradients/a.weight"]
    assert answer["decisive"]["allowed"] == 1e-6
    errors["output/0"] = 1e-9  # has no such noise: one wrong tensor decides
    answer = summary(lines, [*errors], noise)
    assert (answer["verdict"], answer["decisive"]["name"]) == ("not equal", "output/0")


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


def test_bias_before_a_norm_is_noise_and_its_weight_is_not(monkeypatch):
    # verify said NOT equal: the gradient of such a bias is a sum of terms that cancel.
    net = net_of(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    config, reference = _step_of(monkeypatch, net)
    clones = {n: t.clone() for n, t in reference.items()}
    *_, noise = noises(config, RankDevice(), clones, EXACT)
    assert noise["gradients/0.bias"] > 0
    assert noise["gradients/0.weight"] < 1e-12
    assert max(error for name, error in noise.items() if name.startswith("output/")) < 1e-12


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


@pytest.mark.dist
def test_network_that_takes_views_of_maps_runs_as_in_plain_torch(tmp_path: Path):
    # One process gets images in the usual order of memory, in which the view is possible.
    model = {"name": "custom", "target": "tests.helpers.library_jobs:flattening", "classes": 4}
    answer = verified(tmp_path, image=[12, 10], model=model, parallel={"tiles": [2, 1]})
    assert answer["ok"], answer
