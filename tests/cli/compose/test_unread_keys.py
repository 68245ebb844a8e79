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
        ("model=resnet18 model.width=8", "model.width", "model.depth"),
        ("model=resnet18 model.width=64", "model.width", "model.depth"),  # though it is the default
        ("task=predict loss.label_smoothing=0.0", "loss.label_smoothing", "task=evaluate"),
        ("model=unet model.depth=18", "model.depth", "model.levels"),
        ("model=edsr model.layers=6", "model.layers", "model.blocks"),
        ("model=amoebanet model.blocks=2", "model.blocks", "model.filters"),
        ("model=inception_bn model.depth=18", "model.depth", "no key"),
        ("model=preact_resnet model.head=flatten", "model.head", "model.n"),
        ("model=resnet18 model.args={width:8}", "model.args", "model.depth"),
        ("model=unet model.scale=3", "model.scale", "loss=l1"),
        ("model=edsr data=pairs loss=l1 model.res_scale=0.1 model.n=3", "model.n", "model.width"),
        ("data=synthetic data.tissue=0.3", "data.tissue", "data.length"),
        ("data=folder data.length=8", "data.length", "data.path"),
        ("data=cifar10 data.split_file=mine.csv", "data.split_file", "data.path"),
        ("data=masks data.stride=8", "data.stride", "data.ignore"),
        ("loss=bce loss.label_smoothing=0.1", "loss.label_smoothing", "loss.ignore_index"),
        ("loss=l1 data=pairs loss.smooth=2", "loss.smooth", "no key"),
        ("optimizer=adam optimizer.momentum=0.5", "optimizer.momentum", "optimizer.betas"),
        ("optimizer=sgd optimizer.betas=[0.8,0.9]", "optimizer.betas", "optimizer.momentum"),
        ("lr_schedule=cosine lr_schedule.gamma=0.5", "lr_schedule.gamma", "lr_schedule.final"),
        ("task=evaluate optimizer.lr=0.1", "optimizer.lr", "task=train"),
        ("task=infer lr_schedule=cosine", "lr_schedule", "task=train"),
        ("task=predict augment.flip=both", "augment.flip", "task=train"),
        ("task=evaluate data.balance=true", "data.balance", "task=train"),
        ("task=predict data.shuffle=false", "data.shuffle", "task=train"),
        ("task=infer memory.checkpoint=block", "memory.checkpoint", "task=train"),
        ("task=evaluate measure.tensorboard=true", "measure.tensorboard", "task=train"),
        ("task=predict loss.label_smoothing=0.1", "loss.label_smoothing", "task=evaluate"),
        ("data=slide data.groups={_0:tumor}", "data.groups", "data.labels"),
        ("data=slide data.labels=labels.csv data.outside=normal", "data.outside", "geojson"),
        ("data=slide data.cut=whole data.stride=8", "data.stride", "data.cut=patches"),
        ("data=folder data.test=0.2", "data.test", "data.split"),
        ("task=train predict.reduce=probability", "predict.reduce", "task=predict"),
    ],
)
def test_a_key_that_nothing_reads_is_refused_with_those_that_are_read(words, key, reads):
    with pytest.raises(ConfigError) as caught:
        compose(words.split())
    assert key in str(caught.value)
    assert reads in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "model=unet model.width=8 model.levels=2 model.upsample=nearest",
        "model=edsr_large model.scale=4 data=pairs",
        "model=preact_resnet model.depth=29",
        "model=custom model.target=mine:net model.scale=3 data=pairs",
        "task=infer model.depth=18 data.shuffle=false",
        "data=masks data.classes=3 data.ignore=255",
        "task=evaluate loss.label_smoothing=0.1 data.split=test data.test=0.2",
        "data=folder validate.every=epoch data.validation=0.2 data.split_seed=1",
        "data=slide data.labels=annotations/*.geojson data.groups={_0:tumor} data.outside=normal",
    ],
)
def test_keys_that_are_read_are_taken(words):
    compose(words.split())


def test_every_network_lists_the_keys_that_it_reads():
    shared = {"classes", "channels", "image", "scale"}
    listed = {name: {*keys} - {"depth"} for name, keys in model_config.OWN_KEYS.items()}
    read = {name: {*inspect.signature(NETS[name]).parameters} - shared for name in NETS}
    assert listed == {name: keys - {"depth"} for name, keys in read.items()}


def test_every_data_set_lists_the_keys_that_it_reads():
    assert {*data_config.OWN_KEYS} == {*KINDS}
