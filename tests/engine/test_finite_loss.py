"""Does a loss that is not finite end the run with its samples, its true cause and what helps?"""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional as F

import hires.comm
from hires.core.errors import LossError
from tests.helpers.saved import attempt, make

DATA = {"length": 8, "shuffle": False}


def broken_for_class_3(output, labels):
    """A loss of the user's that divides by 0 for one class, which is that of image 3 first."""
    return F.cross_entropy(output, labels) / (labels != 3).all()


def always_broken(output, labels):
    return F.cross_entropy(output, labels) / (labels < 0).sum()


def ended(tmp_path, **keys):
    """Returns what a run said of the loss that ended it."""
    values = {"batch": 2, "parallel": {"microbatches": 2}, "data": DATA, **keys}
    with pytest.raises((AssertionError, LossError)) as caught:
        attempt(make(tmp_path, **values))
    return re.findall(r"the loss is (?:nan|-?inf) at step .*", str(caught.value))[-1]


@pytest.mark.dist
def test_large_steps_are_the_cause_where_they_are(tmp_path):
    said = ended(tmp_path, optimizer={"lr": 1e150})
    assert "a smaller optimizer.lr (now 1e+150) helps" in said
    assert re.search(r"at step [1-9], of the images \d", said)


@pytest.mark.dist
def test_first_step_is_not_blamed_on_the_learning_rate(tmp_path):
    said = ended(tmp_path, loss={"name": "custom", "target": f"{__name__}:always_broken"})
    assert "at step 0, of the images 0, 1;" in said
    assert "optimizer.lr is not the cause" in said
    assert f"loss.target={__name__}:always_broken" in said


@pytest.mark.dist
def test_only_the_samples_of_the_microbatch_are_named(tmp_path):
    keys = {"loss": {"name": "custom", "target": f"{__name__}:broken_for_class_3"}}
    said = ended(tmp_path, **keys, parallel={"replicas": 2}, optimizer={"lr": 1e-9})
    assert "at step 1, of the images 3;" in said


def test_loop_of_the_users_names_samples_too(request):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 2))
    keys = {"image": [8, 8], "batch": 4, "parallel": {"microbatches": 2}}
    request.addfinalizer(hires.comm.shutdown)
    engine = hires.Engine(net, keys)
    images = torch.zeros(4, 3, 8, 8)
    images[3, 0, 0, 0] = torch.nan
    with pytest.raises(LossError, match=r"sample 2, sample 3;.*lr is not the cause"):
        engine.step(images, torch.tensor([0, 1, 0, 1]))
