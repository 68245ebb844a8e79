"""Does the int8 network itself keep the bound of ``quant.auto``, in any layout, as it says?"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hires.core.config.precision_config import PrecisionConfig
from hires.core.store import file_names
from hires.data.opening import open_data
from hires.data.order import step_images
from hires.engine.build import whole_model
from hires.engine.kept_layers import enough_kept
from hires.engine.verify import quantised_step
from hires.plan.operators.operator_facts import facts_of
from hires.quant.scales import read_scales
from tests.helpers.jobs import run_folders
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import run_folder

KEYS = {
    "task": {"name": "calibrate"},
    "batch": 4,
    "steps": 1,
    "measure": {"warmup": 0},
    "data": {"length": 16, "classes": 4},
    "precision": {"name": "fp32"},
}
LAYOUTS = {"single": {}, "tiles": {"parallel": {"tiles": [2, 1]}}}


def chosen(folder):
    """Returns config and scales of calibrations that choose layers, by the name of the layout."""
    quant, calibrated = {"images": 4, "observer": "min_max", "auto": "40dB"}, {}
    for name, keys in LAYOUTS.items():
        config = config_of(**{**KEYS, **keys}, quant=quant)
        path = run_folder(folder / name, config)
        run_ranks(run_folders, plan_of(config).world, [str(path)])
        calibrated[name] = config, path / "a0" / file_names.SCALES
    return calibrated


@pytest.mark.dist
def test_what_is_recorded_is_what_the_int8_network_has(tmp_path):
    """Layers that were rounded one by one kept the bound, and the network did not."""
    calibrated = {}
    for name, (config, place) in chosen(tmp_path).items():
        scales = calibrated[name] = read_scales(place)
        asked, images, operators, signal = scales.auto.values()
        assert operators > 0
        assert (asked, images) == (40, 4)
        assert signal >= 40, name
        quant = dataclasses.replace(config.quant, scales=str(place), auto=None)
        task = dataclasses.replace(config.task, name="infer")
        precision = PrecisionConfig("int8")
        itself = dataclasses.replace(config, quant=quant, task=task, precision=precision)
        plan = plan_of(itself)
        assert any(facts_of(node.kind).quantized for node in plan.graph.nodes)
        made = quantised_step(itself, plan)
        model, source = whole_model(config), open_data(config)
        size = (0, config.height), (0, config.width)
        order = step_images(config, source, 0)
        with torch.no_grad():
            images = [torch.from_numpy(source.window(i, *size)) for i in order]
            exact = model(torch.stack(images)).double()
        made = torch.cat([t for n, t in made.items() if n.startswith("output/")]).double()
        noise = float((made - exact).square().sum() / exact.square().sum())
        assert signal == pytest.approx(-10 * math.log10(noise), abs=0.01), name
    few = calibrated["single"].kept
    assert len(few) > 0
    assert calibrated["tiles"].kept == few


def search(shares, bound=0.01):
    """Which counts were measured, how many are kept, and the noise that is left."""
    asked = []

    def measure(kept):
        asked.append(len(kept))
        return shares[len(kept)]

    kept, share = enough_kept(measure, {f"layer{k}": "" for k in range(len(shares) - 1)}, bound)
    return asked, len(kept), share


def test_more_are_kept_until_the_network_keeps_the_bound():
    shares = [0.5, 0.4, 0.3, 0.2, 0.1, 0.009, 0.008, 0.001, 0.0]
    assert search(shares) == ([0, 4, 6, 5], 5, 0.009)
    assert search(shares, bound=0.6) == ([0], 0, 0.5)
    assert search([0.5] * 6) == ([0, 2, 4, 5], 5, 0.5)  # even all are too few
