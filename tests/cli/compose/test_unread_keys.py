"""Is a key refused that the chosen network, data set, loss, optimiser, schedule or task ignores?

Otherwise a sweep over it shows one run under several names.
"""

from __future__ import annotations

import inspect

import pytest

from hires.cli.compose.compose_config import compose
from hires.core.config import data_config, model_config
from hires.core.errors import ConfigError
from hires.data.source import KINDS
from hires.nets import NETS


@pytest.mark.parametrize(
    ("words", "key", "reads"),
    [
        ("model=resnet18 model.width=64", "model.width", "model.depth"),  # though it is the default
        ("task=predict loss.label_smoothing=0.0", "loss.label_smoothing", "task=evaluate"),
        ("data=synthetic data.tissue=0.3", "data.tissue", "data.length"),
        ("optimizer=adam optimizer.momentum=0.5", "optimizer.momentum", "optimizer.betas"),
        ("lr_schedule=cosine lr_schedule.gamma=0.5", "lr_schedule.gamma", "lr_schedule.final"),
        ("task=infer lr_schedule=cosine", "lr_schedule", "task=train"),
        ("task=predict data.shuffle=false", "data.shuffle", "task=train"),
        ("data=slide data.labels=labels.csv data.outside=normal", "data.outside", "geojson"),
        ("data=folder data.test=0.2", "data.test", "data.split"),
    ],
)
def test_a_key_that_nothing_reads_is_refused_with_those_that_are_read(words, key, reads):
    with pytest.raises(ConfigError) as caught:
        compose(words.split())
    assert key in str(caught.value)
    assert reads in str(caught.value)


def test_keys_that_are_read_are_taken():
    for words in (
        "model=unet model.width=8 model.levels=2 model.upsample=nearest",
        "model=custom model.target=mine:net model.scale=3 data=pairs",
        "task=evaluate loss.label_smoothing=0.1 data.split=test data.test=0.2",
        "data=folder validate.every=epoch data.validation=0.2 data.split_seed=1",
        "data=slide data.labels=annotations/*.geojson data.groups={_0:tumor} data.outside=normal",
    ):
        compose(words.split())


def test_every_network_and_data_set_lists_the_keys_that_it_reads():
    shared = {"classes", "channels", "image", "scale", "depth"}
    for name, keys in model_config.OWN_KEYS.items():
        assert {*keys} - {"depth"} == {*inspect.signature(NETS[name]).parameters} - shared, name
    assert {*model_config.OWN_KEYS} == {*NETS}
    assert {*data_config.OWN_KEYS} == {*KINDS}
