"""Are the losses, metrics and predictions of a training those of one process, in every layout?"""

from __future__ import annotations

import csv
import dataclasses

import numpy as np
import pytest
import tifffile

from hires.cli.data_keys import with_classes
from hires.core.config.validate_config import METRICS
from hires.core.store import file_names, records, rundir
from hires.data.mask_shapes import make_masks
from hires.data.textures import make_folder
from tests.helpers.jobs import run_folders
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import mean_losses

RESNET = {"name": "resnet", "depth": 18, "classes": None}
UNET = {"name": "unet", "levels": 2, "width": 4, "classes": None}
EDSR = {"name": "edsr", "blocks": 2, "width": 4, "scale": 2, "classes": None}
NETS = {
    "ResNet-18 on digits": {"model": {**RESNET, "channels": 1}, "data": {"name": "digits"}},
    "ResNet-18 on textures": {"model": RESNET, "data": {"name": "folder"}},
    "U-Net on label maps": {"model": UNET, "data": {"name": "masks", "classes": 3}},
    "EDSR on pairs": {"model": EDSR, "data": {"name": "pairs"}},
}
# All have two microbatches, in turn, in two replicas or in two directions: the statistics of batch
# norms are those of a microbatch.
LAYOUTS = {
    "single": {"microbatches": 2},
    "sp": {"tiles": [2, 1], "microbatches": 2},
    "dp": {"replicas": 2},
    "sp+pp": {"stages": 2, "tiles": [[1, 2], [1, 1]], "microbatches": 2},
    "sp+gems": {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems"},
}
FEW = ("single", "sp+pp")
"""Layouts of a network of 11 million parameters, whose checkpoints are large."""
CASES = [
    pytest.param(name, LAYOUTS, marks=[pytest.mark.slow] * ("ResNet" in name)) for name in NETS
]
CASES.append(("ResNet-18 on digits", FEW))
KEPT = {"checkpoint": {"at_end": "always"}, "validate": {"every": 2}, "augment": {"flip": "both"}}


def data_of(name, folder):
    if name == "digits":
        return {}
    if name == "masks":
        make_masks(folder, 3, 6, (24, 24), 0)
    else:
        make_folder(folder, classes=2, count=6, size=[24, 24], seed=0)
    return {"path": str(folder), "validation": 0.34}


def run_in_layouts(folder, config, layouts):
    """Runs a config in some layouts, those of as many ranks together; returns the run folders."""
    paths = {}
    for name in layouts:
        parallel = config_of(parallel=LAYOUTS[name]).parallel
        one = dataclasses.replace(config, parallel=parallel, results=str(folder / name))
        plan = plan_of(one)
        assert plan.ok, plan.findings
        path = rundir.create(one, plan.to_dict(), ["hires", "run"]).path
        paths.setdefault(plan.world, {})[name] = path
    for world, some in paths.items():
        run_ranks(run_folders, world, [*map(str, some.values())])
    return {name: path for some in paths.values() for name, path in some.items()}


def predicted(path):
    """Returns the maps of a prediction, or its table, as numbers, and how exact these are."""
    folder = file_names.attempt_dir(path, 0)
    maps = sorted((folder / file_names.PREDICTIONS).glob("**/*.tif"))
    if maps:
        return np.stack([tifffile.imread(one) for one in maps]), 1e-6  # maps are of float32
    rows = [*csv.DictReader((folder / "predictions.csv").read_text().splitlines())]
    shares = [[float(v) for k, v in row.items() if k.startswith("p")] for row in rows]
    return np.array(shares), 1e-10


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("name", "layouts"), CASES)
def test_every_layout_trains_evaluates_and_predicts_alike(tmp_path, name, layouts):
    net = NETS[name]
    data = {**net["data"], **data_of(net["data"]["name"], tmp_path / "images")}
    keys = {"image": [24, 24], "batch": 4, "steps": 3, "data": data, "model": net["model"]}
    if net["data"]["name"] == "pairs":
        keys["image"] = [12, 12]
    if net["model"]["name"] == "resnet":
        # At 24 x 24 the last norms divide by the deviation of two numbers, which rounding decides.
        keys |= {"image": [64, 64], "batch": 8}
    if net["data"]["name"] == "digits":
        keys["data"] = {**data, "validation": 0.005}
    training = with_classes(config_of(**keys, **KEPT, optimizer={"lr": 1e-3}))
    runs = run_in_layouts(tmp_path / "train", training, layouts)
    records_of = {layout: records.read_record(path) for layout, path in runs.items()}
    wanted = records_of["single"]["validation"]["last"]
    losses = mean_losses(runs["single"], 0)
    assert len(losses) == 3
    for layout, path in runs.items():
        assert mean_losses(path, 0) == pytest.approx(losses, rel=1e-10), layout
        found = records_of[layout]["validation"]["last"]
        metrics = [one for one in METRICS if wanted.get(one) is not None]
        assert len(metrics) > 1
        for metric in metrics:
            assert found[metric] == pytest.approx(wanted[metric], rel=1e-10), (layout, metric)

    held = {**keys["data"], "split": "validation"}
    predict = {"task": {"name": "predict"}, "predict": {"reduce": "probability"}}
    config = config_of(**{**keys, **predict, "data": held}, weights=str(runs[[*layouts][-1]]))
    predictions = run_in_layouts(tmp_path / "predict", with_classes(config), layouts)
    numbers, exact = predicted(predictions["single"])
    assert np.isfinite(numbers).all()
    for layout, path in predictions.items():
        assert np.allclose(predicted(path)[0], numbers, rtol=0, atol=exact), layout
