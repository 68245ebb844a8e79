"""Do classes of any size come equally often, and every image of them in its turn?"""

from __future__ import annotations

from collections import Counter

import pytest

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.data.balanced import balanced_order
from hires.data.source import open_data, open_source, step_images
from hires.engine.loader import replica_samples
from tests.helpers.layouts import config_of


class Labels:
    """Stands in for a data set."""

    def __init__(self, *counts):
        self.labels = [label for label, count in enumerate(counts) for _ in range(count)]

    def __len__(self):
        return len(self.labels)

    def label(self, i):
        return self.labels[i]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("counts", [(6, 2, 1), (5, 5), (11, 1, 3, 2)])
def test_classes_come_equally_often(counts, shuffle):
    source = Labels(*counts)
    order, length = balanced_order(source, 3, shuffle), len(source)
    epochs = [order(epoch) for epoch in range(8)]
    for drawn in epochs:
        assert len(drawn) == length
        held = Counter(source.label(i) for i in drawn)
        assert max(held.values()) - min(held.values()) <= 1
        assert len(held) == len(counts)
    # Of a class, no image comes again before all others of it have come.
    seen = Counter(i for drawn in epochs for i in drawn)
    for label in range(len(counts)):
        times = [seen[i] for i in range(length) if source.label(i) == label]
        assert max(times) - min(times) <= 1
    assert (epochs[0] != epochs[1]) == (shuffle or max(counts) > min(counts))


def test_steps_follow_each_other_in_all_replicas():
    keys = {"name": "synthetic", "classes": 3, "length": 20, "balance": True}
    config = config_of(data=keys, batch=6, parallel={"replicas": 2})
    source = open_data(config)
    steps = [step_images(config, source, step) for step in range(7)]
    drawn = [i for step in steps for i in step]
    order = balanced_order(source, config.seed, True)
    assert drawn[:40] == [*order(0), *order(1)]
    parts = [replica_samples(config, source, 2, replica) for replica in (0, 1)]
    assert [*parts[0], *parts[1]] == steps[2]


def test_evaluations_see_every_image_once():
    data = {"name": "synthetic", "classes": 3, "length": 8, "balance": True}
    held = {"task": {"name": "evaluate"}, "measure": {"warmup": 0}}
    config = config_of(data=data, batch=4, steps=2, **held)
    source = open_data(config)
    assert sorted(i for step in (0, 1) for i in step_images(config, source, step)) == [*range(8)]


def test_one_class_cannot_be_balanced():
    source = open_source(DataConfig(name="synthetic", classes=1), (8, 8), 3, 0)
    with pytest.raises(ConfigError, match=r"data\.balance=true: the images have one class only"):
        balanced_order(source, 0, True)
