"""Do tensors get the names that the rules of an import say?"""

from __future__ import annotations

import pytest

from hires.core.errors import ConfigError
from hires.core.store.weight_names import NameRules, of_first_values

NAMES = ["net.layer1.weight", "net.layer10.weight", "ema.decay", "fc.bias"]


def test_beginnings_are_whole_parts_of_a_name():
    rules = NameRules([("net.layer1", "stem")], ["ema"])
    assert rules.renamed(NAMES) == {
        "net.layer1.weight": "stem.weight",
        "net.layer10.weight": "net.layer10.weight",
        "fc.bias": "fc.bias",
    }


def test_first_rule_that_fits_counts():
    renamed = NameRules([("net", ""), ("net.layer1", "never")]).renamed(["net.layer1.weight"])
    assert renamed == {"net.layer1.weight": "layer1.weight"}


def test_every_name_gets_a_beginning():
    assert NameRules([("", "encoder.")]).renamed(["a.b"]) == {"a.b": "encoder.a.b"}


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (NameRules([("net.layer", "x")]), "--rename net.layer: no name begins with it"),
        (NameRules(without=["head"]), "--without head: no name begins with it"),
        (
            NameRules([("net.layer10", "net.layer1")]),
            "net.layer1.weight and net.layer10.weight would both be net.layer1.weight",
        ),
    ],
)
def test_rule_that_makes_no_sense_is_refused(rules, text):
    with pytest.raises(ConfigError, match=text):
        rules.renamed(NAMES)


def test_first_values_are_of_tensors_that_there_are():
    needed = {"fc.weight": [2, 2], "fc.bias": [2], "fcx.bias": [2]}
    assert of_first_values(["fc"], needed) == ["fc.weight", "fc.bias"]
    with pytest.raises(ConfigError, match="--fresh head: the network has no tensor"):
        of_first_values(["head"], needed)
