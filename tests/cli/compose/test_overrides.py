"""Every mistake on the command line is answered with the key, the value and what would work; so is
a key that nothing reads, over which a sweep would show one run under several names."""

from __future__ import annotations

import inspect

import pytest

from hires.cli.choices import config_keys
from hires.cli.compose_config import Composer, compose
from hires.cli.overrides import checked
from hires.core.config.data_config import DataConfig
from hires.core.config.fields import keys_of, names_of
from hires.core.config.model_config import NETWORKS, ModelConfig
from hires.core.errors import ConfigError
from hires.data.source import SOURCES
from hires.nets.build_network import NETS

MISTAKES = [
    # misspelt keys
    ("paralel=sp", "unknown key 'paralel'; did you mean parallel?"),
    ("num_spatial_parts=4", "hires calls it parallel.tiles"),
    ("bogus=1|paralell=sp", "unknown key 'paralell'"),  # all of them at once
    # misspelt choices
    ("parallel=sp+fsdp", "unknown parallel 'sp+fsdp'"),
    ("parallel=sp|gems", "did you mean parallel=gems?"),
    # values of a wrong type
    ("data.shuffle=maybe", "data.shuffle must be true or false"),
    ("parallel.tiles=2", "parallel.tiles=2 must be [rows, cols]"),
    ("batch=x|steps=many|seed=-1", "batch=x has the wrong type"),  # all of them at once
    ("batch=x|steps=many|seed=-1", "steps=many has the wrong type"),
    ("batch=x|steps=many|seed=-1", "seed=-1 must be at least 0"),
    # lists and commas
    ("parallel.tiles=2,2", "'parallel.tiles=[2,2]'"),
    ("batch=2,4", "one run takes one"),
    ("parallel.tiles=[2,|2]", "'parallel.tiles=[2,' cannot be read"),
    ("~model=resnet18", "a ~ takes none; write ~model, with which model has its default again"),
    ("~batch=2", "write ~batch"),
    ("~bogus", "unknown key 'bogus'"),
    ("~model.args.'x\ny'", "has a line break, which the line that repeats a run cannot"),
    # words without a value
    ("steps", "write steps=VALUE"),
    ("data=/tmp", "data=folder data.path=/tmp"),
    ("data.path=${oc.env:HIRES_NOT_SET}", "HIRES_NOT_SET"),
    ("cluster.environment.A='x\ny'", "has a line break, which the line that repeats a run cannot"),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES)
def test_mistake_is_one_paragraph_with_a_remedy(words, text):
    with pytest.raises(ConfigError) as caught:
        compose(words.split("|"))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tilde_gives_every_key_and_group_its_default_again():
    composer = Composer()
    before = composer.composed([])
    for key in [*config_keys(), *composer.groups]:
        assert composer.composed([f"~{key}"]) == before, key
    for words in (
        "batch=3 ~batch", "model=custom ~model", "parallel=sp ~parallel", "++model.args.x=1 "
        "~model.args.x", "~model.width",
    ):  # fmt: skip
        assert compose(words.split()) == compose([]), words  # which says of none that it is unread
    assert compose(["batch=3", "~batch", "batch=4", "~steps"]) == compose(["batch=4"])


def test_parts_of_a_layout_may_come_in_any_order():
    known = {"parallel": {"sp+gems+dp": "", "gems": ""}}
    for words in ("dp+gems+sp", "gems+sp+dp", "sp+gems+dp"):
        assert checked([f"parallel={words}"], known) == ["parallel=sp+gems+dp"]


@pytest.mark.parametrize(
    ("words", "key", "reads"),
    [
        ("model=resnet18 model.width=64", "model.width", "model.depth"),  # though it is the default
        ("task=predict loss.label_smoothing=0.0", "loss.label_smoothing", "task=evaluate"),
        ("data=synthetic data.tissue=0.3", "data.tissue", "data.length"),
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
    shared = {"classes", "channels", "image", "scale", "depth", "files", "trusted"}
    for name in NETS:
        keys = {*keys_of(ModelConfig, name)}
        assert keys - shared == {*inspect.signature(NETS[name]).parameters} - shared, name
    assert {*names_of(ModelConfig)} == {*NETS, "custom"} == {*NETWORKS}
    assert {*names_of(DataConfig)} == {*SOURCES}


@pytest.mark.parametrize("word", ["optimizer=RMSprop", "optimizer.name=RMSprop"])
def test_optimiser_named_as_torch_does_has_its_own_learning_rate(word):
    assert compose([word]) == compose(["optimizer=rmsprop"])
