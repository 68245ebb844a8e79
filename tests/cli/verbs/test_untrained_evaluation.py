"""Does every plan of an evaluation warn if the network is untrained?"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from hires.cli.compose.compose_config import compose
from hires.plan.checks import check_weights
from tests.cli.conftest import SMALL

WORDS = (*SMALL, "data=digits")
WARNING = "no weights=PATH: the network that is evaluated has first weights from the seed"


@pytest.fixture
def weights(traced):
    names = traced.own_params(name for node in traced.nodes for name in node.params)
    facts = {name: traced.params[name] for name in names}
    save_file({n: np.zeros(f.shape, f.dtype) for n, f in facts.items()}, "w.safetensors")
    return "w.safetensors"


def test_a_plan_warns_unless_there_are_weights(hires, weights):
    assert f"warning: {WARNING}" in hires("plan", *WORDS, "task=evaluate").out
    for words in (["task=evaluate", f"weights={weights}"], ["task=infer"], ["task=train"]):
        answer = hires("plan", *WORDS, *words)
        assert answer.code == 0, answer.err
        assert "no weights=PATH" not in answer.out


def test_points_that_differ_in_weights_alone_have_their_own_warnings(hires, weights):
    # They share all else of their plan.
    for order in (f"null,{weights}", f"{weights},null"):
        words = "task=evaluate", f"weights={order}", "--dry-run", "--json"
        answer = hires("sweep", *WORDS, *words)
        assert answer.code == 0, answer.err
        points = json.loads(answer.out)["points"]
        for point in points:
            assert any(WARNING in text for text in point["warnings"]) == (
                "weights=null" in point["overrides"]
            )


@pytest.mark.usefixtures("traced")
def test_a_point_that_will_have_the_weights_of_a_run_before_it_is_not_warned_of(hires):
    first = ("task=train", "checkpoint.every=3")
    flags = [word for one in first for word in ("--first", one)]
    answer = hires("sweep", *WORDS, "task=evaluate", *flags, "--dry-run", "--json")
    assert answer.code == 0, answer.err
    [point] = json.loads(answer.out)["points"]
    assert point["warnings"] == []


def test_a_network_of_ones_own_may_come_with_its_weights():
    config = compose(["task=evaluate", "model=custom", "model.target=nets:trained"])
    [finding] = check_weights(config)
    assert "the numbers that the code of model.target gives it" in finding.text
    assert "seed" not in finding.text
    saved = dataclasses.replace(config.checkpoint, resume="/runs/one")
    assert check_weights(dataclasses.replace(config, checkpoint=saved)) == []
