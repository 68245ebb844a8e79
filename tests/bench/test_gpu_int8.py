"""The check of int8 convolutions on a GPU finds what differs by one bit; here on the CPU."""

from __future__ import annotations

import json

import pytest
import torch

from hires.bench import gpu_int8
from hires.bench.gpu_int8 import same_numbers
from hires.bench.gpu_runs import Runs
from hires.core.config.quant_config import LINEAR
from hires.plan.plan import Plan


def test_equal_numbers_pass():
    passed, details = same_numbers("cpu", 25)
    assert (passed, details) == (True, "25 convolutions by torch are bitwise equal")


def test_one_number_that_differs_fails(monkeypatch):
    to_host, shapes = gpu_int8.to_host, []

    def wrong_once(made: torch.Tensor) -> torch.Tensor:
        shapes.append(made.shape)
        moved = to_host(made).clone()
        if len(shapes) == 7:
            moved[0, 0, 0, 0] ^= 1
        return moved

    monkeypatch.setattr(gpu_int8, "to_host", wrong_once)
    passed, details = same_numbers("cpu", 9)
    assert not passed
    assert details.startswith("1 of 9 convolutions by torch differ, first (2, ")


def test_results_are_spread_over_all_numbers():
    """Most are neither of the bounds: a kernel that is wrong would show."""
    drawn = gpu_int8.random.Random(3)
    torch.manual_seed(3)
    inside = []
    for _ in range(20):
        made = gpu_int8.convolve_int8(*gpu_int8._convolution(drawn)).float()
        inside.append(float(((made > 0) & (made < 255)).float().mean()))
    assert sum(inside) / len(inside) > 0.5


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("linear", LINEAR)
def test_network_in_tiles_has_every_kind_of_operator(tmp_path, linear):
    runs = Runs(tmp_path, "simulated")
    passed, details = gpu_int8.same_network(runs, linear)
    assert passed, details
    [plan] = tmp_path.glob("int8/*/plan.json")
    kinds = {node.kind for node in Plan.from_dict(json.loads(plan.read_text())).graph.nodes}
    layer = "q_linear" if linear == "static" else "q_dynamic_linear"
    assert kinds >= {
        "q_conv2d", "q_conv_transpose2d", "q_avg_pool2d", "max_pool2d", "q_table", "q_add", "cat",
        "q_interpolate", "pad", "q_mean", layer,
    }  # fmt: skip
