"""A stage that is computed again in the backward pass leaves what one pass leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hires.comm import rehearsal
from hires.engine.build import build_rank, whole_model
from hires.engine.loader import whole_microbatches
from tests.helpers.layouts import config_of, plan_of


def statistics(checkpoint: str, microbatches: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the buffers after a step of one rank, whose values are whole, and of plain torch."""
    config = config_of(
        batch=4, memory={"checkpoint": checkpoint}, parallel={"microbatches": microbatches}
    )
    with rehearsal(0):  # one rank: there is nothing to send
        engine = build_rank(config, plan_of(config), 0, 1)
        assert engine.modules[0].recomputes == (checkpoint != "none")
        engine.executor.step(engine.loaders)
        engine.close()
    model = whole_model(config)
    for images, _ in whole_microbatches(config, 0):
        model(images)
    plain = dict(model.named_buffers())
    return {name: engine.tensors[name] for name in plain}, plain


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("checkpoint", ["none", "stage", "block"])
def test_running_statistics_are_updated_once_a_microbatch(checkpoint: str, microbatches: int):
    ours, plain = statistics(checkpoint, microbatches)
    assert any(name.endswith("running_var") for name in plain)
    for name, expected in plain.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-12, atol=1e-12)
        if name.endswith("num_batches_tracked"):
            assert int(ours[name]) == microbatches
