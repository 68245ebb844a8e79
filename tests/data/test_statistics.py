"""A network gets images by the mean and deviation of its data, in training and after it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hires.cli.data_keys import resolve_data
from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.core.store import rundir
from hires.data.opening import open_data
from hires.data.statistics import channel_statistics
from hires.engine.loader import image_of
from tests.helpers.layouts import config_of

DATA = {"length": 24, "classes": 4, "normalize": "dataset"}


def test_network_gets_numbers_of_mean_0_and_deviation_1_of_all_pixels():
    config = config_of(data=DATA)
    white = open_data(config_of(data={**DATA, "normalize": "white"}))
    rect = (0, config.height), (0, config.width)
    pixels = np.stack([white.window(i, *rect) for i in range(24)]).astype(float)
    values = (pixels + 2) / 4  # from 0 to 1
    mean, std = channel_statistics(config)
    assert mean == pytest.approx(values.mean((0, 2, 3)), rel=1e-12)
    assert std == pytest.approx(values.std((0, 2, 3)), rel=1e-9)
    assert channel_statistics(config_of(data=DATA, augment={"brightness": 0.5})) == (mean, std)
    config = resolve_data(config)
    read = image_of(open_data(config), (0, config.height, 0, config.width), config.data)
    made = np.stack([read(i) for i in range(24)])
    assert made.dtype == np.float32
    assert np.abs(made.mean((0, 2, 3))).max() < 1e-5
    assert np.abs(made.std((0, 2, 3)) - 1).max() < 1e-5
    for split in ("validation", "test"):  # of the images that were learnt
        data = {**DATA, "split": split, split: 0.25}
        other = resolve_data(config_of(data=data, task={"name": "evaluate"}))
        train = resolve_data(config_of(data={**data, "split": "train"}))
        assert other.data.mean == train.data.mean != mean


def test_inference_takes_the_numbers_of_the_run_of_its_weights(tmp_path):
    config = dataclasses.replace(resolve_data(config_of(data=DATA)), results=str(tmp_path))
    run = str(rundir.create(config, {}, ["hires", "run"]).path)
    data, task = {"length": 5, "classes": 4}, {"name": "evaluate"}
    later = config_of(data=data, task=task, weights=run)
    assert resolve_data(later).data.mean == config.data.mean
    own = dataclasses.replace(later.data, mean=[0.5] * 3, std=[0.2] * 3)
    assert resolve_data(dataclasses.replace(later, data=own)).data.mean == [0.5] * 3


def test_senseless_numbers_are_refused():
    for error_of, keys, words in (
        (DataConfig, {"mean": [0.5]}, "go together: one number of each"),
        (DataConfig, {"mean": [0.5], "std": [0.0]}, "data.std=0.0 must be above 0"),
        (DataConfig, {"mean": [float("nan")], "std": [1.0]}, "data.mean=nan must be finite"),
        (config_of, {"data": {"mean": [0.5], "std": [0.2]}}, "give one for each channel"),
        (config_of, {"data": {"name": "pairs", "path": "x", "normalize": "dataset"}},
         "data=pairs compares images as they are"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            error_of(**keys)
    with pytest.raises(ConfigError, match="data=images has no classes, which task=train"):
        resolve_data(config_of(data={"name": "images", "path": "x"}))
