"""int8 in layouts: every output has the bits of one process."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch

from hires.core.config.run_config import from_dict, to_dict
from hires.nets.build_network import build_model, materialise
from hires.quant.scales import Scales, write_scales
from tests.helpers.jobs import verify_each
from tests.helpers.layouts import Given
from tests.helpers.parity_rows import Row, by_world, groups, on_each, rows
from tests.helpers.pool import POOL, SIMULATED
from tests.helpers.quantised_nets import QuantisedNet

pytestmark = pytest.mark.dist

GROUPS = groups(rows(section="int8"))
INT8 = {"task": {"name": "infer"}, "precision": {"name": "int8"}}


@pytest.mark.parametrize("group", on_each(GROUPS))
def test_outputs_have_the_bits_of_one_process(group: list[Row], device: str, tmp_path: Path):
    layouts = [quantised(row, tmp_path, device=device) for row in group]
    errors = POOL.run(verify_each, layouts[0][2]["world"], layouts)[0]
    assert errors == {row.name: 0.0 for row in group}


def test_outputs_have_them_on_a_device_that_is_no_cpu(tmp_path: Path):
    layouts = [
        quantised(r, tmp_path, device="simulated") for r in rows("simulated", "int8").values()
    ]
    assert len(layouts) > 3
    for size, some in by_world(layouts).items():
        errors = SIMULATED.run(verify_each, size, some)[0]
        assert errors == {layout[0]: 0.0 for layout in some}


def quantised(row: Row, folder: Path, **more: str) -> Given:
    """Returns a row as ranks take it, with the scales of its network."""
    file = folder / f"{row.name}.json"
    config = row.config(**INT8, **more)
    whole = to_dict(config) | {"parallel": {}, "device": "cpu"}
    write_scales(file, scales_of(json.dumps(whole)))
    layout = row.given(folder, **INT8, **more, quant={"scales": str(file)})
    kinds = {node["op"].partition(".")[0] for node in layout[2]["graph"]["nodes"]}
    assert ("q_dynamic_linear" in kinds) == (config.quant.linear == "dynamic")
    assert any(kind.startswith("q_") for kind in kinds)
    return layout


@functools.cache
def scales_of(values: str) -> Scales:
    """Returns the scales of a config's network; with ``linear=dynamic`` linear inputs have none."""
    config = from_dict(json.loads(values))
    size, linear = (config.height, config.width), config.quant.linear
    net = build_model(config.model, config.seed, size)
    materialise(net, [*net.state_dict()], config.seed)
    made = QuantisedNet(net, torch.rand(2, 3, *size), linear=linear)
    scales = made.scales()
    if linear != "dynamic":
        return scales
    inputs = {n.inputs[0] for n in made.float_graph.nodes if n.kind in ("linear", "fused_linear")}
    kept = {n: one for n, one in scales.values.items() if n not in inputs}
    assert len(kept) < len(scales.values)
    ranges = {n: scales.ranges[n] for n in kept}
    return dataclasses.replace(scales, values=kept, ranges=ranges)
