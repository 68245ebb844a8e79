"""Do classes and steps follow from the data?"""

from __future__ import annotations

from typing import Any

import pytest

from hires.cli.data_keys import with_classes
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError
from hires.core.store.naming import run_name


def resolved(**keys: Any) -> RunConfig:
    """Returns a config of 10 images with what follows from them."""
    return with_classes(from_dict({"image": 8, "batch": 4, "data": {"length": 10}, **keys}))


@pytest.mark.parametrize(
    ("epochs", "steps"), [(1, 3), (2, 5), (4, 10), (0.5, 2), (40, 100), (1.1, 3)]
)
def test_every_image_is_taken_as_often_as_there_are_epochs(epochs: float, steps: int):
    config = resolved(epochs=epochs, measure={"warmup": 0})
    assert (config.steps, config.epochs) == (steps, None)


def test_run_of_epochs_is_the_run_of_as_many_steps():
    long = resolved(epochs=40.0)
    assert long.measure.warmup == 2
    assert run_name(long) == run_name(resolved(steps=100))


def test_training_of_epochs_saves_its_weights_at_the_end():
    assert resolved(epochs=2.0).checkpoint.saves_end
    assert not resolved(epochs=2.0, checkpoint={"at_end": "never"}).checkpoint.saves_end
    assert not resolved(steps=5).checkpoint.saves_end


def test_training_from_real_images_saves_its_weights_at_the_end():
    # Its steps were done and nothing was left of them; weights from synthetic images are of no use.
    digits = {"name": "digits"}
    keys = {"steps": 5, "data": digits, "model": {"channels": 1}}
    assert resolved(**keys).checkpoint.saves_end
    assert not resolved(**keys, task={"name": "infer"}).checkpoint.saves_end
    never = resolved(**keys, checkpoint={"at_end": "never"})
    assert not never.checkpoint.saves_end
    assert run_name(never) == run_name(resolved(**keys))


def test_short_epochs_have_a_shorter_warm_up():
    assert resolved(epochs=0.1).measure.warmup == 0


def test_warm_up_of_the_learning_rate_is_compared_with_the_steps_of_the_epochs():
    with pytest.raises(ConfigError, match=r"lr_schedule.warmup=50 leaves no step of steps=5"):
        resolved(epochs=2.0, lr_schedule={"warmup": 50})
    assert resolved(epochs=40.0, lr_schedule={"warmup": 50}).steps == 100
