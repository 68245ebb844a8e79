"""Metrics of labels and numbers are those of scikit-learn 1.9, whose values stand here."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from hires.core.evaluation_summary import columns_of, is_larger_better, summary
from hires.core.losses import LABELS, NUMBERS
from hires.engine.evaluation_intervals import number_intervals
from hires.parallel.loss import plain_loss
from hires.report.record import RecordedClass
from hires.report.typed_values import typed
from tests.helpers.layouts import config_of

LABELLED = [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 1, 0], [0, 1, 0]]
SHARES = [[0.9, 0.2, 0.1], [0.4, 0.8, 0.3], [0.4, 0.8, 0.2], [0.1, 0.3, 0.6], [0.7, 0.8, 0.1],
          [0.6, 0.5, 0.2]]  # fmt: skip
TARGETS = [[20.0, 1e6], [31.5, 1e6 + 3], [44.0, 1e6 + 1], [27.25, 1e6 - 4], [60.0, 1e6]]
VALUES = [[22.5, 1e6 + 1], [30.0, 1e6 + 1], [40.0, 1e6], [29.0, 1e6 - 1], [52.0, 1e6 + 2]]


def summarised(kind, targets, outputs, exact=()):
    losses = [[0.5, int(one)] for one in exact] or [[0.5]] * len(targets)
    rows = [[*loss, *t, *o] for loss, t, o in zip(losses, targets, outputs, strict=True)]
    shape = [2, len(targets[0])]
    columns = columns_of(kind, rows, shape)
    return summary(kind, columns, {}, [*"abc"[: shape[1]]], shape)


def test_labels_of_images():
    exact = [
        [p > 0.5 for p in share] == [*map(bool, label)]
        for label, share in zip(LABELLED, SHARES, strict=True)
    ]
    found = summarised(LABELS, LABELLED, SHARES, exact)
    # c occurs in no image: it has no average precision, and F1=0, since it is predicted.
    assert found["mean_ap"] == pytest.approx(
        (0.8666666666666667 + 0.7208333333333333) / 2, abs=1e-15
    )
    assert found["mean_f1"] == pytest.approx((0.6666666666666666 + 0.5714285714285714 + 0) / 3)
    assert found["subset_accuracy"] == 2 / 6
    assert [one["count"] for one in found["classes"]] == [3, 4, 0]
    assert [one["recall"] for one in found["classes"]] == [2 / 3, 0.5, None]
    assert [one["precision"] for one in found["classes"]] == [2 / 3, 2 / 3, 0]
    recorded = [typed(RecordedClass, one) for one in found["classes"]]
    assert [one.f1 for one in recorded] == [2 / 3, 4 / 7, 0]
    assert found["subset_accuracy_ci95"][0] < 1 / 3 < found["subset_accuracy_ci95"][1]


def test_probability_that_is_not_finite_is_wrong():
    nan = [math.nan] * 3
    found = summarised(LABELS, LABELLED[:2], [nan, SHARES[1]], [0, 0])
    assert found["not_finite"] == 1
    assert [one["recall"] for one in found["classes"]] == [0, 1, None]
    assert [one["precision"] for one in found["classes"]] == [None, 0.5, 0]
    values = summarised(NUMBERS, TARGETS[:2], [nan[:2], VALUES[1]])
    assert (values["not_finite"], values["mae"], values["r2"]) == (1, None, None)


def test_numbers_of_images():
    found = summarised(NUMBERS, TARGETS, VALUES)
    assert found["mae"] == pytest.approx(2.675)
    assert found["rmse"] == pytest.approx(3.1143347805588575, rel=1e-14)
    assert found["r2"] == pytest.approx(0.5884323421459001, rel=1e-12)
    assert [is_larger_better(name) for name in ("mae", "rmse", "r2")] == [False, False, True]
    same = summarised(NUMBERS, [[3.0], [3.0]], [[3.0], [3.0]])
    other = summarised(NUMBERS, [[3.0], [3.0]], [[3.0], [3.5]])
    assert (same["r2"], other["r2"], summarised(NUMBERS, [[3.0]], [[3.0]])["r2"]) == (1, 0, None)


def test_intervals_hold_the_truth_as_often_as_they_say():
    random = np.random.default_rng(0)
    truth = {"mae_ci95": math.sqrt(2 / math.pi), "rmse_ci95": 1.0, "r2_ci95": 0.5}
    hits = dict.fromkeys(truth, 0)
    for _ in range(100):
        output, error = random.normal(size=(2, 60))
        target = output + error + 1e7
        for name, interval in number_intervals([(target, output + 1e7)]).items():
            low, high = interval or (0.0, 0.0)
            hits[name] += low <= truth[name] <= high
    assert all(88 <= hit <= 100 for hit in hits.values()), hits
    assert number_intervals([([1.0], [2.0])]) == dict.fromkeys(truth)


def test_loss_of_labels_is_that_of_torch():
    data = {"targets": "classes", "classes": 3}
    output = torch.randn(6, 3, dtype=torch.float64)
    labels = torch.tensor(LABELLED, dtype=torch.float64)
    for factors in (None, [1.0, 0.0, 4.5]):
        keys = config_of(data=data, model={"classes": 3}, loss={"weights": factors}).objective
        weight = None if factors is None else torch.tensor(factors, dtype=torch.float64)
        plain = functional.binary_cross_entropy_with_logits
        wanted = plain(output, labels, pos_weight=weight)
        assert plain_loss(keys, output, labels) == pytest.approx(float(wanted), rel=1e-14)
        maps = output.T.reshape(1, 3, 2, 3)  # of pixels, whose label has the class 2
        hot = torch.zeros_like(maps)
        hot[:, 2] = 1
        of_pixels = replace(keys, targets="classes")
        wanted = plain(maps, hot, pos_weight=None if weight is None else weight[:, None, None])
        labelled = torch.full((1, 2, 3), 2)
        assert plain_loss(of_pixels, maps, labelled) == pytest.approx(float(wanted), rel=1e-14)
