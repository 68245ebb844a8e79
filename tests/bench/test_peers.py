"""Are torch's own rows the same network as that of hires?"""

from __future__ import annotations

import pytest
import torch

from hires.bench.contestants import LayoutsOptions, line_up
from hires.bench.runners import (
    crossing,
    plain_module,
    reference_steps,
    whole_batch,
)
from hires.engine.loader import whole_microbatches


@pytest.fixture(scope="module")
def rows():
    options = LayoutsOptions(device="cpu", model="resnet18", image=[48, 48], microbatches=2)
    return {row.name: row for row in line_up(options, "train")}


def test_trick_changes_no_number(rows):
    config = rows["module"].config
    [(images, _)] = whole_microbatches(config, 0)
    with_trick, without = plain_module(config), plain_module(config, trick=False)
    dilated = [m for m in with_trick.modules() if getattr(m, "dilation", 1) == (2, 2)]
    assert len(dilated) == 3  # the projections of layers 2 to 4
    torch.testing.assert_close(
        with_trick.double()(images.double()), without.double()(images.double())
    )


def test_weights_of_1x1_convolutions_have_the_strides_of_their_gradients(rows):
    config = rows["module"].config
    [(images, _)] = whole_microbatches(config, 0)
    module = plain_module(config)
    module(images).sum().backward()
    small = [p for p in module.parameters() if p.shape[2:] == (1, 1)]
    assert small
    assert all(p.grad.stride() == p.stride() for p in small)


def test_whole_batch_is_the_microbatches_in_order(rows):
    config = rows["pp gpipe"].config
    images, labels = whole_batch(config)
    parts = whole_microbatches(config, 0)
    assert len(parts) == 2
    assert torch.equal(images, torch.cat([x for x, _ in parts]))
    assert torch.equal(labels, torch.cat([y for _, y in parts]))
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_crossing_values_are_those_of_the_plan(rows):
    plan = rows["pp gpipe"].plan
    assert crossing(plan, 0) == [edge.value for edge in plan.edges]
    assert crossing(plan, 1) == []


def test_reference_averages_over_all_replicas(rows):
    config = rows["dp"].config
    alone = []
    for images, labels in (x for replica in (0, 1) for x in whole_microbatches(config, replica)):
        output = plain_module(config)(images)
        alone.append(torch.nn.functional.cross_entropy(output, labels))
    torch.testing.assert_close(reference_steps(config).step(), torch.stack(alone).mean().view(1))
