"""A rewritten network computes what the network itself computes, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hires.comm import rehearsal
from hires.core.config.run_config import RunConfig
from hires.engine.build import build_rank, whole_model
from hires.engine.loader import whole_microbatches
from tests.helpers.layouts import config_of, plan_of


def inference(seed: int, **keys: Any) -> RunConfig:
    target = "tests.helpers.random_nets:composed"
    model = {"name": "custom", "target": target, "classes": 4, "args": {"seed": seed}}
    return config_of(model=model, task={"name": "infer"}, **keys)


def outputs(config: RunConfig) -> list[Tensor]:
    with rehearsal(0, shared_memory=False), torch.no_grad():
        engine = build_rank(config, plan_of(config), 0, 1)
        made = engine.executor.step(engine.loaders, keep_outputs=True).outputs
        engine.close()
    return [made[key] for key in sorted(made)]


@pytest.mark.parametrize("seed", range(12))
def test_random_networks_are_the_same_fused_and_not(seed: int):
    config = inference(seed)
    model = whole_model(config)
    with torch.no_grad():
        expected = [model(images) for images, _ in whole_microbatches(config, 0)]
    for fuse in ("auto", "off"):
        config.engine.fuse = fuse
        for got, wanted in zip(outputs(config), expected, strict=True):
            assert (got - wanted).abs().max() <= 1e-12 * wanted.abs().max()
