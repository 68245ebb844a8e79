"""Losses, metrics and predictions of a training are those of one process in every layout."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tifffile

from hires.cli.data_keys import resolve_data
from hires.core.config.data_config import TARGETS
from hires.core.config.run_config import RunConfig
from hires.core.evaluation_summary import METRICS
from hires.core.store import file_names, records, rundir
from hires.data.make_data import make_data
from tests.helpers.jobs import run_folders
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.pool import POOL
from tests.helpers.saved import mean_losses

NETS = {
    "digits": {"name": "preact_resnet", "depth": 11, "channels": 1, "classes": None},
    "masks": {"name": "unet", "levels": 2, "width": 4, "classes": None},
    "classes": {"name": "preact_resnet", "depth": 11, "classes": None},
    "numbers": {"name": "preact_resnet", "depth": 11, "classes": None},
    "pairs": {"name": "edsr", "blocks": 2, "width": 4, "scale": 2, "classes": None},
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
TRAINING = {
    "checkpoint": {"at_end": "always"},
    "validate": {"every": 2},
    "augment": {"flip": "both"},
    "optimizer": {"lr": 1e-3},
}


def data_of(name: str, folder: Path) -> dict:
    if name == "digits":
        return {"name": name, "validation": 0.005}
    if name in TARGETS:
        return {"targets": name, "classes": 3, "length": 18, "validation": 0.34}
    if name == "masks":
        make_data("masks", folder, 3, 6, (24, 24), 0)
    else:
        make_data("textures", folder, classes=2, count=6, size=[24, 24], seed=0)
    classes = {"classes": 3} if name == "masks" else {}
    return {"name": name, "path": str(folder), "validation": 0.34, **classes}


def run_in_layouts(folder: Path, config: RunConfig) -> dict[str, Path]:
    """Runs a config in all layouts, those of as many ranks together; returns the run folders."""
    paths = {}
    for name, keys in LAYOUTS.items():
        parallel = config_of(parallel=keys).parallel
        one = dataclasses.replace(config, parallel=parallel, results=str(folder / name))
        plan = plan_of(one)
        assert plan.ok, plan.findings
        path = rundir.create(one, plan.to_dict(), ["hires", "run"]).path
        paths.setdefault(plan.world, {})[name] = path
    for world, some in paths.items():
        POOL.run(run_folders, world, [*map(str, some.values())])
    return {name: path for some in paths.values() for name, path in some.items()}


def predicted(path: Path) -> tuple[np.ndarray, float]:
    """Returns the maps of a prediction, or its table, as numbers, and their tolerance."""
    folder = file_names.attempt_dir(path, 0)
    maps = sorted((folder / file_names.PREDICTIONS).glob("**/*.tif"))
    if maps:
        return np.stack([tifffile.imread(one) for one in maps]), 1e-6  # maps are of float32
    rows = [*csv.DictReader((folder / "predictions.csv").read_text().splitlines())]
    shares = [[float(v) for k, v in row.items() if k.startswith(("p", "texture"))] for row in rows]
    return np.array(shares), 1e-10


@pytest.mark.dist
@pytest.mark.parametrize("name", NETS)
def test_every_layout_trains_evaluates_and_predicts_alike(tmp_path: Path, name: str):
    size = [12, 12] if name == "pairs" else [24, 24]
    data = data_of(name, tmp_path / "images")
    keys = {"image": size, "batch": 4, "steps": 3, "data": data, "model": NETS[name]}
    runs = run_in_layouts(tmp_path / "train", resolve_data(config_of(**keys, **TRAINING)))
    results = {layout: records.read_record(path) for layout, path in runs.items()}
    expected, losses = results["single"]["validation"]["last"], mean_losses(runs["single"], 0)
    metrics = [metric for metric in METRICS if expected.get(metric) is not None]
    assert len(losses) == 3
    assert len(metrics) > 1
    for layout, path in runs.items():
        assert mean_losses(path, 0) == pytest.approx(losses, rel=1e-10), layout
        result = results[layout]["validation"]["last"]
        for metric in metrics:
            assert result[metric] == pytest.approx(expected[metric], rel=1e-10), (layout, metric)

    keys["data"] = {**data, "split": "validation"}
    predict = {"task": {"name": "predict"}, "predict": {"reduce": "probability"}}
    config = config_of(**keys, **predict, weights=str(runs["sp+gems"]))
    predictions = run_in_layouts(tmp_path / "predict", resolve_data(config))
    numbers, tolerance = predicted(predictions["single"])
    assert np.isfinite(numbers).all()
    for layout, path in predictions.items():
        assert np.allclose(predicted(path)[0], numbers, rtol=0, atol=tolerance), layout
