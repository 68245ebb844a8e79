"""A pass over the data counts each sample once, and as one process would, in every layout."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from hires.core.config.run_config import to_dict
from hires.core.errors import PREEMPTED
from hires.core.evaluation_summary import (
    CLASSES,
    IMAGES,
    METRICS,
    PIXELS,
    SampleMetric,
    columns_of,
    metrics_of,
    summary,
)
from hires.core.ranks.world import World
from hires.core.store import file_names, records
from hires.data.opening import PairSource, open_data
from hires.engine import evaluation_intervals
from hires.engine.evaluate import Evaluator
from hires.engine.evaluation_intervals import mean_interval, overlap_intervals
from hires.metrics import image_metrics
from hires.metrics.image_metrics import Ssim
from hires.plan.planner import is_better
from tests.helpers.evaluations import EDSR, GEMS, UNET, evaluation, expected
from tests.helpers.jobs import evaluate_each
from tests.helpers.layouts import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import structural_similarity
from tests.helpers.saved import attempt, run_folder

PIPE = {"stages": 2, "microbatches": 2}
UNEVEN = {"stages": 2, "tiles": [[1, 1], [1, 2]], "microbatches": 2}
LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "stages": (CLASSES, {"parallel": PIPE}),
        "pixels in tiles": (PIXELS, {**UNET, "parallel": {"tiles": [1, 2]}}),
        "images in replicas": (IMAGES, {**EDSR, "parallel": {"replicas": 2}}),
    },
    3: {
        "gems": (CLASSES, {"parallel": GEMS}),
        "images in a stage, then in tiles": (IMAGES, {**EDSR, "parallel": UNEVEN}),
    },
    4: {
        "shards": (CLASSES, {"parallel": {"stages": 2, "tiles": [2, 1], "local_dp": 2}}),
        "images in tiles smaller than half a window": (
            IMAGES, {**EDSR, "image": [7, 8], "parallel": {"tiles": [4, 1]}}
        ),
    },
}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("size", LAYOUTS)
def test_every_layout_counts_what_plain_torch_counts(size: int):
    layouts, references = [], {}
    for name, (kind, keys) in LAYOUTS[size].items():
        config = evaluation(**keys)
        plan = plan_of(config)
        assert plan.ok, plan.findings
        assert plan.world == size
        layouts.append((name, to_dict(config), plan.to_dict()))
        references[name] = kind, expected(config, kind)
    answers = run_ranks(evaluate_each, size, layouts)
    assert all(answer == answers[0] for answer in answers)  # all ranks have the summary
    for name, (kind, reference) in references.items():
        found = answers[0][name]
        assert (found["kind"], found["images"]) == (kind, 11)
        for key, value in reference.items():
            if key == "confusion" or (kind == PIXELS and key.endswith("ci95")):
                assert found[key] == value, name
            else:
                assert found[key] == pytest.approx(value, rel=1e-10), (name, key)


def readers(world: World, layouts: list[tuple[Any, ...]]) -> set[str]:
    """Evaluates; returns the names of the threads that read targets."""
    threads, whole = set[str](), PairSource.target

    def target(source: PairSource, *args: Any, **keys: Any) -> Any:
        threads.add(threading.current_thread().name)
        return whole(source, *args, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairSource, "target", target)
        evaluate_each(world, layouts)
    return threads


@pytest.mark.dist
def test_targets_are_read_ahead_and_not_in_the_step():
    config = evaluation(**EDSR, parallel={"stages": 2, "tiles": [[1, 1], [2, 1]]})
    layout = "", to_dict(config), plan_of(config).to_dict()
    first, *last = run_ranks(readers, 3, [layout])
    assert first == set()
    assert all(name.startswith("loader") for names in last for name in names)
    assert all(last)


@pytest.mark.dist
def test_stopped_evaluation_goes_on_and_predicts_the_very_same(tmp_path: Path):
    config = evaluation(parallel={"tiles": [2, 1]}, precision={"name": "fp32"})
    whole, stopped = (run_folder(tmp_path / name, config) for name in "ab")
    assert attempt(whole) == [0, 0]
    assert attempt(stopped, stop_at=2) == [PREEMPTED, PREEMPTED]
    assert not (stopped / "a0" / "evaluation.json").exists()
    assert attempt(stopped) == [0, 0]
    written = [
        json.loads((file_names.attempt_dir(path, number) / "evaluation.json").read_text())
        for path, number in ((whole, 0), (stopped, 1))
    ]
    assert written[0] == written[1]
    assert written[0]["samples"]["id"] == [str(i) for i in range(11)]
    record = records.read_record(stopped)
    assert (record["state"], record["evaluation"]["images"]) == ("done", 11)
    assert "samples" not in record["evaluation"]


def counted_in_one_process(output: Any, target: Any, **keys: Any) -> tuple[Any, Evaluator]:
    """Returns what an evaluator counts of one sample on one process, and the evaluator."""
    config = evaluation(**keys)
    evaluator = Evaluator(config, open_data(config), plan_of(config).graph)
    return evaluator._map_row(0, output, target), evaluator


def test_what_is_not_finite_is_wrong_and_no_white():
    output = torch.zeros(4, 2, 3)
    output[0] = 1.0  # class 0 everywhere, which is the label
    output[:, 0, 0], output[2, 1, 1] = math.nan, math.inf
    row, evaluator = counted_in_one_process(output, 0, **UNET)
    assert row[1:] == [6, 4]
    assert evaluator.counted.pixels == {(0, 0, 0): 4, (0, 0, -1): 2}
    shape = (1, *output.shape)
    columns = columns_of(PIXELS, [row], shape)
    facts = summary(PIXELS, columns, Counter({(0, 0): 4, (0, -1): 2}), list("abcd"), shape)
    assert facts["top1"] == facts["mean_iou"] == facts["mean_recall"] == pytest.approx(4 / 6)
    assert facts["not_finite"] == 2
    counts = {(i, a, p): n for i in (0, 1) for (_, a, p), n in evaluator.counted.pixels.items()}
    assert overlap_intervals(counts, 2, 4)["mean_iou_ci95"] == pytest.approx([4 / 6, 4 / 6])
    white = np.full((3, 24, 20), 2.0)
    image = torch.full((3, 24, 20), 2.0)
    assert counted_in_one_process(image, white, **EDSR)[0][:2] == [0, 0]
    image[0, 0, 0] = math.inf
    row, _ = counted_in_one_process(image, white, **EDSR)
    columns = columns_of(IMAGES, [row, [0.0, 0.0, 420.0]], (2, *image.shape))
    facts = summary(IMAGES, columns, {}, [], (2, *image.shape))
    assert (facts["psnr"], facts["ssim"], facts["not_finite"]) == (None, None, 1)


class Brier(SampleMetric):
    """The mean squared error of the probabilities of a class."""

    outputs, title, larger_is_better = (CLASSES,), "Brier", False

    @classmethod
    def count(cls, output: torch.Tensor, target: torch.Tensor) -> float:
        wanted = functional.one_hot(target, len(output))
        return float((output.softmax(0) - wanted).square().sum())


def test_metric_of_a_module_is_counted_summed_up_judged_and_shown(monkeypatch):
    monkeypatch.setitem(METRICS._items, "brier", Brier)
    assert metrics_of(CLASSES, (3, 2)).keys() == {"top1", "mean_recall", "brier"}
    config = evaluation()
    assert is_better(config, "brier", 0.1, 0.2)
    evaluator = Evaluator(config, open_data(config), plan_of(config).graph)
    scores, labels = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 3, 1])
    rows = [*evaluator._class_rows(scores, labels)]
    columns = columns_of(CLASSES, rows, scores.shape)
    errors = (scores.softmax(1) - functional.one_hot(labels, 4)).square().sum(1)
    assert columns["brier"] == pytest.approx(errors.tolist())
    facts = summary(CLASSES, columns, {}, list("abcd"), scores.shape)
    assert facts["brier"] == pytest.approx(float(errors.mean()))


@pytest.mark.parametrize(("n", "t_975"), [(5, 2.776), (30, 2.045)])
def test_interval_of_a_mean_is_students(n: int, t_975: float):
    values = np.random.default_rng(n).normal(30.0, 2.0, n)
    low, high = mean_interval(values.tolist())
    half = t_975 * values.std(ddof=1) / math.sqrt(n)
    # 2000 draws place an end within 5 % of the half, and few units are no normal distribution.
    assert low == pytest.approx(values.mean() - half, abs=0.2 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.2 * half)


def pixels_of(num_images: int) -> Counter[tuple[int, int, int]]:
    """Pixels by (image, class, predicted class): each image has an accuracy of its own."""
    rng, counts = np.random.default_rng(0), Counter[tuple[int, int, int]]()
    for image in range(num_images):
        right = rng.beta(8, 2)
        for label in (0, 1):
            hits = int(rng.binomial(500, right))
            counts[image, label, label] += hits
            counts[image, label, 1 - label] += 500 - hits
    return counts


def shares_by_hand(counts: Any, images: Any) -> list[float]:
    """Share of right pixels, mean IoU and mean Dice of some images."""
    total = Counter[tuple[int, int]]()
    for image in images:
        for (of, label, made), number in counts.items():
            total[label, made] += number * (of == image)
    right = sum(number for (label, made), number in total.items() if label == made)
    ious, dices = [], []
    for label in {label for label, _ in +total}:
        hits = total[label, label]
        either = sum(n * ((t == label) + (p == label)) for (t, p), n in total.items())
        ious.append(hits / (either - hits))
        dices.append(2 * hits / either)
    return [right / sum(total.values()), *(sum(some) / len(some) for some in (ious, dices))]


def test_draws_are_counted_by_the_formula_of_the_whole(monkeypatch):
    counts = {**pixels_of(6), (6, 2, 2): 70, (6, 2, 0): 30}  # a class of one image
    found, by_hand = overlap_intervals(counts, 7, 3), shares_by_hand(counts, range(7))
    for name, value in zip(("top1_ci95", "mean_iou_ci95", "mean_dice_ci95"), by_hand, strict=True):
        low, high = found[name]
        assert 0 <= low < value < high <= 1, name
    assert overlap_intervals(dict(reversed(counts.items())), 7, 3) == found  # bit for bit
    monkeypatch.setattr(evaluation_intervals, "_AT_ONCE", 7 * 300)  # several blocks of draws
    assert overlap_intervals(counts, 7, 3) == found


def test_image_without_labels_leaves_no_interval_undefined():
    counts = dict(pixels_of(3))
    assert overlap_intervals(counts, 4, 2) == overlap_intervals(counts, 3, 2)
    few = {key: count for key, count in counts.items() if key[0] == 0}
    assert overlap_intervals(few, 2, 2)["top1_ci95"] is None  # of one image


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two similar images of the sizes of a network's output, from -2 to 2."""
    generator = torch.Generator().manual_seed(2)
    wanted = torch.rand(3, 17, 23, generator=generator).double() * 4 - 2
    return wanted + 0.5 * torch.randn(3, 17, 23, generator=generator), wanted


@pytest.mark.parametrize("side", [3, 100])
def test_similarity_is_that_of_the_reference(side: int, monkeypatch):
    monkeypatch.setattr(image_metrics, "_SIDE", side)  # blocks have the sum of the whole
    made, wanted = images()
    before = made.clone(), wanted.clone()
    a, b = ((one.clamp(-2, 2).numpy() + 2) / 4 for one in (made, wanted))
    found = Ssim.count(made, wanted) / (3 * 7 * 13)
    assert found == pytest.approx(structural_similarity(a, b), rel=1e-12)
    assert Ssim.count(wanted, wanted) == pytest.approx(3 * 7 * 13, rel=1e-12)
    assert torch.equal(made, before[0])  # also in float64, where no copy is needed
    assert torch.equal(wanted, before[1])
    made[1, 8, 8] = math.inf
    assert math.isnan(Ssim.count(made, wanted))
    assert Ssim.count(made[:, :10], wanted[:, :10]) == 0.0
