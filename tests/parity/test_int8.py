"""int8 in layouts: every output has the bits of one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from hires.nets.build_network import build_model, materialise
from hires.quant.scales import read_scales, write_scales
from tests.helpers.jobs import verify_each
from tests.helpers.layouts import Given
from tests.helpers.parity_rows import Row, by_world, groups, rows
from tests.helpers.pool import POOL, SIMULATED
from tests.helpers.quantised_nets import QuantisedNet

pytestmark = pytest.mark.dist

GROUPS = groups(rows(section="int8"))
INT8 = {"task": {"name": "infer"}, "precision": {"name": "int8"}}


@pytest.mark.parametrize("group", GROUPS)
def test_outputs_have_the_bits_of_one_process(group: str, tmp_path: Path):
    layouts = [quantised(row, tmp_path) for row in GROUPS[group]]
    errors = POOL.run(verify_each, layouts[0][2]["world"], layouts)[0]
    assert errors == {row.name: 0.0 for row in GROUPS[group]}


def test_outputs_have_them_on_a_device_that_is_no_cpu(tmp_path: Path):
    layouts = [
        quantised(r, tmp_path, device="simulated") for r in rows("simulated", "int8").values()
    ]
    assert len(layouts) > 3
    for size, some in by_world(layouts).items():
        errors = SIMULATED.run(verify_each, size, some)[0]
        assert errors == {layout[0]: 0.0 for layout in some}


def quantised(row: Row, folder: Path, **more: str) -> Given:
    """Returns a row as ranks take it; with ``linear=dynamic`` linear inputs have no scales."""
    config = row.config(**INT8, **more)
    size, file = (config.height, config.width), folder / f"{row.name}.json"
    net = build_model(config.model, config.seed, size)
    materialise(net, [*net.state_dict()], config.seed)
    linear = config.quant.linear
    made = QuantisedNet(net, torch.rand(2, 3, *size), linear=linear)
    made.write(file)
    if linear == "dynamic":
        scales = read_scales(file)
        inputs = {
            n.inputs[0] for n in made.float_graph.nodes if n.kind in ("linear", "fused_linear")
        }
        values = {n: one for n, one in scales.values.items() if n not in inputs}
        assert len(values) < len(scales.values)
        ranges = {n: scales.ranges[n] for n in values}
        write_scales(file, dataclasses.replace(scales, values=values, ranges=ranges))
    layout = row.given(folder, **INT8, **more, quant={"scales": str(file)})
    kinds = {node["op"].partition(".")[0] for node in layout[2]["graph"]["nodes"]}
    assert ("q_dynamic_linear" in kinds) == (linear == "dynamic")
    assert any(kind.startswith("q_") for kind in kinds)
    return layout
