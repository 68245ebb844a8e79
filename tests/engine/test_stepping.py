"""Are the steps of an engine in a loop of the user's those of plain torch, in every layout?"""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.shard_jobs import (
    plain_steps,
    steps_of_an_engine,
    steps_on_images,
    wrong_engines,
    wrong_targets,
)

LAYOUTS = {
    "one rank": {},
    "tiles, then a stage": {"stages": 2, "tiles": [[2, 1], [1, 1]]},
    "gems": {"stages": 2, "directions": 2, "schedule": "gems"},
}
SIZES = [1, 3, 2]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "size"), [*zip(LAYOUTS, SIZES, strict=True)])
def test_steps_are_those_of_plain_torch(name, size):
    losses, parameters = plain_steps()
    answers = run_ranks(steps_of_an_engine, size, LAYOUTS[name])
    held = set()
    for found, own in answers:
        assert found == pytest.approx(losses, rel=1e-10)
        for key, value in own.items():
            assert np.abs(value - parameters[key]).max() < 1e-10, (name, key)
            held.add(key)
    assert held == {*parameters}


REFUSED = [
    "this layout has 3 ranks, and the world has 2; start 3",
    "needs the keys image and batch",
    "unknown key imagee",
    "it takes model.channels alone",
    "a batch of [2, 3, 18, 16] with 2 targets",
    "a batch of [4, 3, 18, 16] with 2 targets",
    'validate={"every": 2} is for `hires run`, and hires.Engine would ignore it; leave it out',
    "the module returns [4, 4, 18, 16] for images of 18x16, and loss=l1 compares images of 3",
    "targets are a list; give a tensor",
    "images are a list; give a tensor",
    "a batch of [4, 3, 18, 16] with no targets",
    "this layout has 1 rank, and the world has 2; start 1",
    'task={"name": "evaluate"} is for `hires run`, and hires.Engine would ignore it; leave it out',
    'device="cuda" is for `hires run`',
    "parallel=auto is for `hires run`, which chooses the layout",
    "unknown key lr; did you mean optimizer.lr?",
    "unknown key wholly; choose one of image, batch, steps, seed, model, parallel, precision, "
    "engine, comm, optimizer, lr_schedule, loss, memory",
    "nothing",
]


@pytest.mark.dist
def test_wrong_calls_are_answered_with_the_remedy():
    for texts in run_ranks(wrong_engines, 2):
        for wanted, text in zip(REFUSED, texts, strict=True):
            assert wanted in text


@pytest.mark.dist
def test_targets_that_a_loss_cannot_compare_are_named():
    loss = "dice"
    # Dice and bce counted a label out of range as of no class; others were errors of torch's.
    wanted = [
        "label 5 of sample 2, row 3, column 4, is out of range: the network has 4 classes, 0 to 3",
        "label -1 of sample 1",
        f"a target of [4, 9, 16], where loss={loss} compares classes with an output of",
        f"a target of torch.float64, where loss={loss} compares class numbers; give target.long()",
        "label 7 of sample 0 is out of range",
        "nothing",
        f"soft labels, shares of each class, are not supported by loss={loss}; give class numbers",
    ]
    for texts in run_ranks(wrong_targets, 2, loss):
        for part, text in zip(wanted, texts, strict=True):
            assert part in text
        assert "or name pixels without a class, loss.ignore_index=5" in texts[0]
        assert texts[4].endswith("0 to 3; correct it")  # of a whole image it spoke of pixels


@pytest.mark.dist
def test_module_that_makes_images_of_its_inputs_size_learns():
    # It was refused, for want of model.scale=1, which an engine did not take.
    for found, plain, texts in run_ranks(steps_on_images, 2, "l1", [2, 1]):
        assert found == pytest.approx(plain, rel=1e-12)
        assert "a target of [2, 3, 4, 6]" in texts[0]
        assert "a target of torch.int64" in texts[1]
        assert "give target.float()" in texts[1]
