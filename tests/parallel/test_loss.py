"""A loss is one entry of a table; its value over tiles or shards is that of the whole output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hires.core.config.run_config import from_dict, to_dict
from hires.core.losses import LOSSES, Loss
from hires.core.ranks.world import World
from hires.parallel.loss import plain_loss
from tests.helpers.jobs import verify
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks

EDSR = {"model": {"name": "edsr", "blocks": 2, "width": 4}, "image": [13, 10]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tiles": {"tiles": [2, 1]},
    "shards": {"stages": 2, "local_dp": 2},
}


@pytest.mark.parametrize("name", LOSSES)
def test_number_of_terms_is_what_torchs_mean_is_over(name: str):
    loss, output = LOSSES[name], torch.randn(2, 3, 4, 5)
    target = torch.randn_like(output) if loss.targets == "images" else torch.tensor([2, 0])
    total = plain_loss(name, output, target, "sum")
    terms = loss.num_terms([*output.shape])
    torch.testing.assert_close(total / terms, plain_loss(name, output, target))


def charbonnier(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """A loss that torch lacks: a smooth l1."""
    terms = ((output - target).square() + 1e-6).sqrt()
    return terms.sum() if reduction == "sum" else terms.mean()


def rank_with_another_loss(world: World, name: str, loss: Loss, *args: Any) -> Any:
    """Verifies a layout whose loss has another entry."""
    LOSSES[name] = loss
    return verify(world, *args)


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", ["mse_loss", f"{__name__}:charbonnier"])
def test_another_loss_is_one_entry(function: str, layout: str, tmp_path: Path):
    config = config_of(**EDSR, parallel=LAYOUTS[layout])
    assert config.loss == "l1"
    plan = plan_of(config)
    assert plan.ok, plan.findings
    given = (to_dict(config), plan.to_dict(), str(tmp_path))
    answer = run_ranks(rank_with_another_loss, plan.world, "l1", Loss(function, "images"), *given)[
        0
    ]
    assert answer["max_rel_err"] < 1e-10, answer


def test_every_loss_is_a_value_of_the_key():
    for name in LOSSES:
        assert from_dict({"task": {"loss": name}}).loss == name
