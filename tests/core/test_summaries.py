"""Accuracies follow from what was counted, and learning rates are those of torch."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hires.core.config.run_config import from_dict
from hires.core.config.training_config import CURVES, learning_rate
from hires.core.errors import RunError
from hires.core.evaluation_summary import (
    CLASSES,
    IMAGES,
    PIXELS,
    by_class,
    by_sample,
    columns_of,
    paired_difference,
    summary,
    wilson,
)
from hires.core.store.step_lines import ENDED_LINE, EPOCH_LINE, VALIDATED_LINE, line_text
from tests.helpers.plain_training import torch_rates

LABELS, MADE = [0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 0, -1]


def rows_of(labels=LABELS, made=MADE):
    places = [0 if t == p else 3 if p < 0 else 1 for t, p in zip(labels, made, strict=True)]
    return [[0.5, t, p, place, 0.9] for t, p, place in zip(labels, made, places, strict=True)]


def summed(kind, rows, counts, names, shape):
    return summary(kind, columns_of(kind, rows, shape), counts, names, shape)


def test_classes_by_hand():
    found = summed(CLASSES, rows_of(), {}, ["a", "b", "c"], (6, 3))
    assert found["top1"] == 3 / 6
    assert "top5" not in found  # of three classes
    assert found["not_finite"] == 1  # counts as wrong
    assert found["loss"] == 0.5
    assert found["confusion"] == [[1, 1, 0], [0, 2, 0], [1, 0, 0]]
    a, b, c = found["classes"]
    assert [a["count"], a["precision"], a["recall"]] == [2, 1 / 2, 1 / 2]
    assert [b["precision"], b["recall"]] == [2 / 3, 1]
    assert [c["precision"], c["recall"]] == [None, 0]
    assert found["mean_recall"] == 0.5
    rows = [[0.0, 0, 1, place, 1.0] for place in range(8)]
    assert summed(CLASSES, rows, {}, [*"abcdefgh"], (8, 8))["top5"] == 5 / 8


def test_overlap_of_pixels_by_hand():
    counts = {(0, 0): 6, (0, 1): 2, (1, 1): 3, (1, 0): 1}
    rows = [[2.4, 12, 9]]
    found = summed(PIXELS, rows, counts, ["back", "front", "none"], (1, 3, 3, 4))
    assert found["top1"] == 9 / 12
    assert found["loss"] == pytest.approx(0.2)
    front = by_class(counts, ["back", "front"], overlaps=True)[1]
    assert [front["iou"], front["dice"]] == [3 / 6, 6 / 9]
    assert found["mean_iou"] == (6 / 9 + 3 / 6) / 2  # of the classes that occur


def test_ratio_of_images_is_their_mean_and_infinite_ones_are_null():
    rows = [[8.0, 4 * 16.0], [0.0, 4 * 0.16]]
    found = summed(IMAGES, rows, {}, [], (2, 1, 2, 2))
    assert found["psnr"] == pytest.approx((0 + 20) / 2)
    assert found["loss"] == 1.0
    assert "ssim" not in found  # smaller than a window
    assert summed(IMAGES, [[0.0, 0.0]], {}, [], (1, 1, 2, 2))["psnr"] is None
    found = summed(IMAGES, [[0.0, 1.0, 12.0], [0.0, 1.0, 6.0]], {}, [], (2, 3, 12, 12))
    assert found["ssim"] == pytest.approx((1.0 + 0.5) / 2)  # over windows and channels


def test_parts_of_a_sample_are_added_whatever_their_order():
    rows = [[1, 0.1, 4, 2], [0, 1e-17, 2, 2], [1, 0.2, 4, 1], [0, 1.0, 2, 0], [0, 1e-17, 2, 1]]
    made = by_sample(PIXELS, rows, 2)
    assert (
        made
        == by_sample(PIXELS, rows[::-1], 2)
        == [[math.fsum([1, 2e-17]), 6, 3], [0.1 + 0.2, 8, 3]]
    )


def test_sample_that_no_rank_or_two_ranks_counted_is_named():
    row = [0, 1, 1, 0, 0, 0]
    for rows in ([row], [row, [2, *row[1:]]]):
        with pytest.raises(RunError, match="no rank evaluated sample 1 of 3"):
            by_sample(CLASSES, rows, 3)
    with pytest.raises(RunError, match="sample 0 was evaluated 2 times"):
        by_sample(CLASSES, [row] * 2, 1)
    for beyond in (3, -1):
        with pytest.raises(RunError, match=f"a rank evaluated sample {beyond}, and there are 3"):
            by_sample(PIXELS, [[sample, 0.0, 1, 1] for sample in (0, 1, 2, beyond)], 3)


def test_interval_of_a_share_is_wilsons():
    # Values of Newcombe, Statistics in Medicine 17 (1998), table I.
    assert wilson(81, 263) == pytest.approx([0.2553, 0.3662], abs=5e-5)
    assert wilson(0, 20) == pytest.approx([0.0, 0.1611], abs=5e-5)
    assert wilson(0, 0) is None


def test_interval_of_a_difference_by_hand():
    # 4 gained, 1 lost of 98: shares 5/100 and 2/100, variance (0.07 - 0.0009) / 100
    low, high = paired_difference(4, 1, 98)
    half = 1.959963984540054 * math.sqrt(0.000691)
    assert (low, high) == pytest.approx((0.03 - half, 0.03 + half))
    assert paired_difference(1, 4, 98) == pytest.approx((-high, -low))
    assert paired_difference(0, 0, 0) is None


def test_lines_of_a_training_say_when_it_was_how_good():
    line = {"kind": VALIDATED_LINE, "step": 11, "metric": "top1", "top1": 0.93, "loss": 0.21}
    epoch = {"kind": EPOCH_LINE, "epoch": 3, "loss": 0.41, "epoch_s": 14.2, "left_s": 43.0}
    ended = {"kind": ENDED_LINE, "rank": 0, "step": 12, "metric": "top1", "patience": 3}
    why = "ended early after step 12: no better top1 in 3 evaluations (validate.patience)"
    for facts, text in (
        (
            {**line, "better": True},
            "evaluated after step 12: top1 0.93, loss 0.21, the best so far",
        ),
        ({**line, "better": False, "metric": "loss"}, "evaluated after step 12: loss 0.21"),
        (epoch, "epoch 3, mean loss 0.41, 14.20 s, about 43.00 s left"),
        ({**epoch, "loss": None, "left_s": 0.0}, "epoch 3, 14.20 s"),
        (ended, why),
        ({**ended, "rank": 1}, None),  # one rank says it
    ):
        assert line_text(facts) == text


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


def test_rates_are_those_of_torch():
    for case, keys in CASES.items():
        config = config_with(**keys)
        ours = [learning_rate(config, step) for step in range(config.steps)]
        assert ours == pytest.approx(torch_rates(config), rel=1e-12), case


@pytest.mark.parametrize("name", CURVES)
def test_rate_is_a_number_in_every_step_of_every_length(name: str):
    for steps in range(1, 12):
        config = from_dict(
            {"steps": steps, "measure": {"warmup": 0}, "lr_schedule": {"name": name}}
        )
        assert all(0 <= learning_rate(config, step) <= 0.005 for step in range(steps + 3))


def test_rate_of_a_replica_is_multiplied_by_their_number():
    keys = {"optimizer": {"lr": 0.1, "scale_lr": True}, "parallel": {"replicas": 4, "stages": 2}}
    assert learning_rate(from_dict({**keys, "batch": 8}), 0) == pytest.approx(0.4)
