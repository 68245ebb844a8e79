"""Does a pass over the data count each sample once, and as one process would, in every layout?"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional

from hires.cli.data_keys import with_classes
from hires.core.config.run_config import to_dict
from hires.core.errors import PREEMPTED
from hires.core.evaluation_summary import CLASSES, IMAGES, PIXELS, summary
from hires.core.store import file_names, records, rundir
from hires.data.source import open_data
from hires.engine.build import whole_model
from hires.engine.evaluate import Evaluator
from hires.engine.evaluation_intervals import mean_interval, overlap_intervals
from tests.helpers.jobs import evaluate_each, evaluate_while_training
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import structural_similarity

EVALUATE = {"task": {"name": "evaluate"}, "batch": 4, "data": {"length": 11, "classes": 4}}
UNET = {"model": {"name": "unet", "levels": 2, "width": 4, "classes": 4}, "image": [20, 16]}
EDSR = {"model": {"name": "edsr", "blocks": 1, "width": 4, "scale": 2}, "image": [12, 10]}
"""Images of 24 x 20, so that windows of SSIM reach over several tiles."""
PRODUCT = {"parallel": {"stages": 2, "microbatches": 2}}


def evaluation(**keys):
    return with_classes(config_of(**{**EVALUATE, **keys}))


def plain(config):
    """Returns what plain torch computes, image by image: outputs and targets."""
    model, source = whole_model(config), open_data(config)
    rows, cols = (0, config.height), (0, config.width)
    outputs, targets = [], []
    with torch.no_grad():
        for i in range(len(source)):
            image = torch.from_numpy(source.window(i, rows, cols))[None].double()
            outputs.append(model(image)[0])
            rect = config.target_rect
            targets.append(
                source.label(i) if rect is None else source.target(i, rect[:2], rect[2:])
            )
    return outputs, targets


def expected(config, kind):
    outputs, targets = plain(config)
    if kind == IMAGES:
        pairs = [(o, torch.from_numpy(t).double()) for o, t in zip(outputs, targets, strict=True)]
        errors = [float((o.clamp(-2, 2) - t).square().mean()) for o, t in pairs]
        ratios = [10 * math.log10(16 / error) for error in errors]
        losses = [float((o - t).abs().mean()) for o, t in pairs]
        mean, interval = sum(ratios) / len(ratios), mean_interval(ratios)
        scaled = [[(one.clamp(-2, 2).numpy() + 2) / 4 for one in pair] for pair in pairs]
        similar = [structural_similarity(*pair) for pair in scaled]
        found = {"psnr": mean, "psnr_ci95": interval, "loss": sum(losses) / len(losses)}
        return found | {"ssim": sum(similar) / 11, "ssim_ci95": mean_interval(similar)}
    counts, by_image, losses, size = Counter(), Counter(), [], 0
    for image, (output, target) in enumerate(zip(outputs, targets, strict=True)):
        labels = torch.full(output.shape[1:], target)
        losses.append(float(functional.cross_entropy(output[None], labels[None], reduction="sum")))
        for made in output.argmax(0).flatten().tolist():
            counts[target, made] += 1
            by_image[image, target, made] += 1
            size += 1
    confusion = [[counts[t, p] for p in range(4)] for t in range(4)]
    right = sum(confusion[t][t] for t in range(4))
    found = {"top1": right / size, "loss": sum(losses) / size, "confusion": confusion}
    return found | (overlap_intervals(by_image, len(outputs), 4) if kind == PIXELS else {})


LAYOUTS = {
    1: [("one batch larger than the data", CLASSES, {"batch": 16})],
    2: [
        ("tiles", CLASSES, {"parallel": {"tiles": [2, 1]}}),
        ("stages", CLASSES, PRODUCT),
        ("replicas", CLASSES, {"parallel": {"replicas": 2}}),
        ("pixels in tiles", PIXELS, {**UNET, "parallel": {"tiles": [1, 2]}}),
        ("images in tiles", IMAGES, {**EDSR, "parallel": {"tiles": [2, 1]}}),
        ("images in stages", IMAGES, {**EDSR, **PRODUCT}),
        ("images in replicas", IMAGES, {**EDSR, "parallel": {"replicas": 2}}),
    ],
    3: [
        ("tiles, then one rank", CLASSES, {"parallel": {"stages": 2, "tiles": [[2, 1], [1, 1]]}}),
        ("uneven tiles", PIXELS, {**UNET, "parallel": {"tiles": [3, 1]}}),
        (
            "images in a stage, then in tiles",
            IMAGES,
            {
                **EDSR,
                "parallel": {"stages": 2, "tiles": [[1, 1], [1, 2]], "microbatches": 2},
            },
        ),
    ],
    4: [
        (
            "gems",
            CLASSES,
            {"parallel": {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems"}},
        ),
        (
            "shards",
            CLASSES,
            {"parallel": {"stages": 2, "tiles": [2, 1], "local_dp": 2}},
        ),
        (
            "images in tiles smaller than half a window",
            IMAGES,
            {
                **EDSR,
                "image": [7, 8],
                "parallel": {"tiles": [4, 1]},
            },
        ),
        ("images in a grid", IMAGES, {**EDSR, "parallel": {"tiles": [2, 2], "microbatches": 2}}),
        (
            "images in tiles and stages, both directions",
            IMAGES,
            {
                **EDSR,
                "parallel": {
                    "tiles": [[2, 1], [2, 1]],
                    "stages": 2,
                    "directions": 2,
                    "schedule": "gems",
                },
            },
        ),
    ],
}


@pytest.mark.sampled(2)
@pytest.mark.dist
@pytest.mark.parametrize("size", LAYOUTS)
def test_every_layout_counts_what_plain_torch_counts(size):
    given, references = [], {}
    for name, kind, keys in LAYOUTS[size]:
        config = evaluation(**keys)
        plan = plan_of(config)
        assert plan.ok, plan.findings
        assert plan.world == size
        given.append((name, to_dict(config), plan.to_dict()))
        references[name] = kind, expected(config, kind)
    answers = run_ranks(evaluate_each, size, given)
    assert all(answer == answers[0] for answer in answers)  # all ranks have the summary
    for name, (kind, reference) in references.items():
        found = answers[0][name]
        assert found["kind"] == kind
        assert found["images"] == 11
        for key, value in reference.items():
            if key == "confusion" or (kind == PIXELS and key.endswith("ci95")):
                assert found[key] == value, name
            else:
                assert found[key] == pytest.approx(value, rel=1e-10), (name, key)


@pytest.mark.dist
def test_training_evaluates_its_own_tensors_and_goes_on(tmp_path):
    # Two engines on the same tensors: one plan with backward passes, one without.
    layout = {"parallel": {"tiles": [2, 1], "stages": 2, "microbatches": 2}}
    training = config_of(**{**EVALUATE, **layout, "task": {"name": "train"}, "image": [16, 16]})
    config = evaluation(**layout, image=[16, 16])
    given = [(to_dict(one), plan_of(one).to_dict()) for one in (with_classes(training), config)]
    found, *others = run_ranks(evaluate_while_training, 3, str(tmp_path), *given)
    assert others == [found] * 2
    for step, one in zip((1, 3), found, strict=True):
        held = [torch.load(tmp_path / f"{step} {rank}", weights_only=True) for rank in range(3)]
        path = tmp_path / "now.pt"
        torch.save({name: tensor for tensors in held for name, tensor in tensors.items()}, path)
        reference = expected(dataclasses.replace(config, weights=str(path)), CLASSES)
        assert one["confusion"] == reference["confusion"]
        assert one["loss"] == pytest.approx(reference["loss"], rel=1e-10)
    assert found[0]["loss"] != found[1]["loss"]


def folder_of(tmp_path, **keys):
    config = dataclasses.replace(evaluation(**keys), results=str(tmp_path))
    return rundir.create(config, plan_of(config).to_dict(), ["hires", "run"]).path


def written(path, attempt):
    return json.loads((file_names.attempt_dir(path, attempt) / "evaluation.json").read_text())


@pytest.mark.dist
def test_stopped_evaluation_goes_on_and_predicts_the_very_same(tmp_path):
    from tests.helpers.saved import attempt

    keys = {"parallel": {"tiles": [2, 1]}, "precision": {"name": "fp32"}}
    whole, stopped = folder_of(tmp_path / "a", **keys), folder_of(tmp_path / "b", **keys)
    assert attempt(whole) == [0, 0]
    assert attempt(stopped, stop_at=2) == [PREEMPTED, PREEMPTED]
    assert not (stopped / "a0" / "evaluation.json").exists()
    assert attempt(stopped) == [0, 0]
    assert written(stopped, 1) == written(whole, 0)
    record = records.read_record(stopped)
    assert record["state"] == "done"
    assert record["evaluation"]["images"] == 11
    assert "samples" not in record["evaluation"]
    assert written(whole, 0)["samples"]["id"] == [str(i) for i in range(11)]


def test_steps_of_an_evaluation_are_those_of_one_pass():
    config = evaluation(steps=99, measure={"warmup": 7})
    assert [config.steps, config.measure.warmup, config.shuffles] == [3, 2, False]
    assert evaluation(data={"split": "validation", "length": 40, "classes": 4}).steps == 1


def counted_alone(output, target, **keys):
    """What an evaluator counts of one sample on one process, and its summary."""
    config = evaluation(**keys)
    source, graph = open_data(config), plan_of(config).graph
    evaluator = Evaluator(config, source, graph)
    row = evaluator._map_row(0, output, target)
    return row, evaluator


def test_pixels_that_are_not_finite_are_wrong():
    output = torch.zeros(4, 2, 3)
    output[0] = 1.0  # class 0 everywhere, which is the label
    output[:, 0, 0], output[2, 1, 1] = math.nan, math.inf
    row, evaluator = counted_alone(output, 0, **UNET)
    assert row[:2] == [6, 4]
    assert evaluator.counted.pixels == {(0, 0, 0): 4, (0, 0, -1): 2}
    facts = summary(PIXELS, [row], Counter({(0, 0): 4, (0, -1): 2}), list("abcd"))
    assert facts["top1"] == facts["mean_iou"] == facts["mean_recall"] == pytest.approx(4 / 6)
    assert facts["not_finite"] == 2
    counts = {(i, a, p): n for i in (0, 1) for (_, a, p), n in evaluator.counted.pixels.items()}
    intervals = overlap_intervals(counts, 2, 4)
    assert intervals["mean_iou_ci95"] == pytest.approx([4 / 6, 4 / 6])


def test_a_pixel_of_an_image_that_is_infinite_is_no_white():
    white = np.full((3, 24, 20), 2.0)
    output = torch.full((3, 24, 20), 2.0)
    assert counted_alone(output, white, **EDSR)[0][0] == 0
    output[0, 0, 0] = math.inf
    row, _ = counted_alone(output, white, **EDSR)
    facts = summary(IMAGES, [row, [0.0, 0.0, 420.0]], {}, [], output.shape)
    assert (facts["psnr"], facts["ssim"], facts["not_finite"]) == (None, None, 1)
