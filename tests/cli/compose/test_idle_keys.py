"""Are typed keys that a run does not read named?"""

from __future__ import annotations

import pytest

from hires.cli.compose.idle_keys import idle_keys
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from tests.cli.conftest import SMALL


@pytest.mark.parametrize("task", ["evaluate", "predict"])
def test_steps_of_one_pass_are_named(task):
    config = from_dict({"task": {"name": task}, "steps": 12, "batch": 3})
    [note] = idle_keys(config, ["steps=5", f"task={task}"])
    assert note.text == (
        f"steps does nothing: task={task} makes one pass over its data, 12 steps of batch=3"
    )
    assert not [*idle_keys(config, [f"task={task}"])]


def test_steps_of_a_calibration_follow_from_its_images():
    config = from_dict({"task": {"name": "calibrate"}, "quant": {"images": 96}})
    [note] = idle_keys(config, ["task=calibrate", "steps=5"])
    assert "task=calibrate takes as many as quant.images=96 need in batches of 8" in note.text
    assert not [*idle_keys(config, ["task=calibrate"])]


def test_steps_of_other_tasks_count():
    assert not [*idle_keys(from_dict({"steps": 5}), ["steps=5"])]


def test_plan_shows_it(hires, traced):
    answer = hires("plan", *SMALL, "task=predict", "data=synthetic")
    assert "steps does nothing: task=predict makes one pass" in answer.out, answer.err


@pytest.mark.parametrize("task", ["evaluate", "train"])
def test_form_of_a_prediction_is_refused_elsewhere(task):
    with pytest.raises(ConfigError, match=f"probability is for task=predict, not task={task}"):
        from_dict({"task": {"name": task}, "predict": {"reduce": "probability"}})
