"""Do learning rates equal those of ``torch.optim.lr_scheduler``?"""

from __future__ import annotations

from typing import Any

import pytest

from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.core.learning_rate import CURVES, learning_rate
from tests.helpers.plain_training import torch_rates

CASES: dict[str, dict[str, Any]] = {
    "constant": {"name": "constant"},
    "warm-up": {"name": "constant", "warmup": 5},
    "step": {"name": "step", "step_size": 7, "gamma": 0.3},
    "step behind a warm-up": {"name": "step", "step_size": 4, "warmup": 3, "warmup_begin": 0.01},
    "cosine": {"name": "cosine", "final": 1e-4},
    "cosine behind a warm-up": {"name": "cosine", "warmup": 6},
    "cosine of a longer run": {"name": "cosine", "steps": 60},
    "one cycle": {"name": "one_cycle", "rise": 0.25, "first_divisor": 10.0},
    "one cycle behind a warm-up": {"name": "one_cycle", "warmup": 2, "last_divisor": 50.0},
    "one cycle without a rise": {"name": "one_cycle", "rise": 0.01},
}


def config_with(length: int = 30, **schedule: Any) -> Any:
    """Returns a config with a schedule."""
    return from_dict({"steps": length, "optimizer": {"lr": 0.1}, "lr_schedule": schedule})


@pytest.mark.parametrize("case", CASES)
def test_rates_are_those_of_torch(case: str):
    config = config_with(**CASES[case])
    ours = [learning_rate(config, step) for step in range(config.steps)]
    assert ours == pytest.approx(torch_rates(config), rel=1e-12)


@pytest.mark.parametrize("name", CURVES)
def test_rate_is_a_number_in_every_step_of_every_length(name: str):
    for steps in range(1, 12):
        config = from_dict(
            {"steps": steps, "measure": {"warmup": 0}, "lr_schedule": {"name": name}}
        )
        assert all(0 <= learning_rate(config, step) <= 0.005 for step in range(steps + 3))


def test_rate_of_a_replica_is_multiplied_by_their_number():
    keys = {"optimizer": {"lr": 0.1, "scale_lr": True}, "parallel": {"replicas": 4}}
    assert learning_rate(from_dict({**keys, "batch": 8}), 0) == pytest.approx(0.4)


def test_longer_run_is_on_another_curve_unless_its_length_is_given():
    short, long = config_with(20, name="cosine"), config_with(30, name="cosine")
    assert learning_rate(short, 10) != learning_rate(long, 10)
    short, long = (config_with(n, name="cosine", steps=20) for n in (20, 30))
    assert [learning_rate(short, k) for k in range(20)] == [
        learning_rate(long, k) for k in range(20)
    ]
    assert learning_rate(long, 29) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"name": "exponential"}, r"lr_schedule='exponential' is unknown; choose one of constant"),
        ({"warmup": 30}, r"lr_schedule.warmup=30 leaves no step of steps=30 .* steps=31 or more"),
        ({"name": "cosine", "steps": 9, "warmup": 9}, r"of lr_schedule.steps=9 to lr_schedule=cos"),
        ({"name": "cosine", "gamma": 0.5}, r"lr_schedule.gamma=0.5 is for lr_schedule=step, not"),
        ({"steps": 9}, r"lr_schedule.steps=9 is for lr_schedule=cosine or one_cycle, not"),
        ({"warmup_begin": 0.5}, r"lr_schedule.warmup_begin=0.5 needs lr_schedule.warmup"),
        ({"name": "one_cycle", "rise": 1.5}, r"lr_schedule.rise=1.5 must be a share"),
        ({"warmups": 3}, r"unknown key lr_schedule.warmups"),
    ],
)
def test_wrong_schedule_is_answered_with_the_remedy(schedule, expected):
    with pytest.raises(ConfigError, match=expected):
        config_with(**schedule)
