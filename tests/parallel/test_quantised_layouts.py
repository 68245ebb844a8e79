"""int8 in layouts of real ranks: every output has the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hires.nets.build_network import build_model, materialise
from tests.helpers.jobs import verify_each
from tests.helpers.layouts import config_of, given
from tests.helpers.quantised_nets import QuantisedNet
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

MOBILE = {"name": "custom", "target": "tests.helpers.small_nets8:mobile", "classes": 5}
EFFICIENT = {"name": "custom", "target": "tests.helpers.small_nets8:Efficient"}
UNET = {"name": "unet", "width": 4, "levels": 2, "classes": 3}
INT4 = {**UNET, "width": 8}
"""Its weights have 4 bits, those of 64 or more a channel."""
LAYOUTS: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        "rows": ({}, {"tiles": [2, 1]}),
        "columns, halos of two layers": ({}, {"tiles": [1, 2], "halo": {"fuse": 2}}),
        "stages": (UNET, {"stages": 2, "microbatches": 2}),
        "rows of a U-Net": (UNET, {"tiles": [2, 1]}),
        "shards": ({}, {"stages": 1, "local_dp": 2}),
        "both directions": ({}, {"stages": 2, "directions": 2, "schedule": "gems"}),
        "depthwise, columns": (MOBILE, {"tiles": [1, 2]}),
        "rows, overlap": ({}, {"tiles": [2, 1], "halo": {"overlap": "on"}}),
        "depthwise, columns, overlap": (MOBILE, {"tiles": [1, 2], "halo": {"overlap": "on"}}),
        "weighted channels, rows": (EFFICIENT, {"tiles": [2, 1]}),
        "weighted channels, shards": (EFFICIENT, {"local_dp": 2}),
        "stages, 4 bits": (INT4, {"stages": 2, "microbatches": 2}),
        "rows, 4 bits": (INT4, {"tiles": [2, 1]}),
    },
    3: {
        "three tiles": ({}, {"tiles": [3, 1]}),
        "tiles, then a stage": (UNET, {"tiles": [1, 2], "stages": 2, "spatial_stages": 1}),
    },
    4: {
        "four tiles": ({}, {"tiles": [2, 2]}),
        "tiles in both directions": (
            {},
            {"tiles": [2, 1], "stages": 3, "spatial_stages": 1, "directions": 2,
             "schedule": "gems"},
        ),
        "depthwise, four tiles": (MOBILE, {"tiles": [2, 2]}),
    },
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_outputs_have_the_bits_of_one_process(tmp_path, ranks):
    errors = errors_of(tmp_path, ranks, LAYOUTS[ranks])
    assert len(errors) == len(LAYOUTS[ranks])
    assert max(errors.values()) == 0, errors


def test_outputs_have_them_on_a_device_that_is_no_cpu(tmp_path):
    names = ("stages", "rows of a U-Net", "depthwise, columns")
    chosen = {name: LAYOUTS[2][name] for name in names}
    errors = errors_of(tmp_path, 2, chosen, device="simulated")
    assert errors == dict.fromkeys(names, 0.0)


def errors_of(
    tmp_path: Path,
    ranks: int,
    wanted: dict[str, tuple[dict[str, Any], dict[str, Any]]],
    **keys: Any,
) -> dict[str, float]:
    """Returns by how much the outputs of layouts differ from those of one process."""
    layouts = []
    for name, (model, parallel) in wanted.items():
        own: dict[str, Any] = {"task": {"name": "infer"}, "precision": {"name": "int8"}, **keys}
        own |= {"parallel": parallel} | ({"model": model} if model else {})
        config = config_of(**own)
        path = tmp_path / f"{name}.json"
        net = build_model(config.model, config.seed, (config.height, config.width))
        materialise(net, [*net.state_dict()], config.seed)
        QuantisedNet(net, torch.rand(2, 3, config.height, config.width)).write(path)
        bits = {"weights": "int4"} if model is INT4 else {}
        own["quant"] = {"scales": str(path), **bits}
        layouts.append(given(name, tmp_path, config_of(**own)))
    errors: dict[str, float] = run_ranks(verify_each, ranks, layouts)[0]
    return errors
