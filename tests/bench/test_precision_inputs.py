"""Do all rows of ``hires bench precision`` share images and weights, and are the weights usable?"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hires.bench import precision_inputs
from hires.bench.precision_cases import PrecisionCase, PrecisionOptions
from hires.bench.precision_inputs import calibration_words, make_inputs, set_statistics
from hires.bench.runners import whole_batch
from hires.cli.calibration import calibration_of
from hires.cli.compose.compose_config import compose


def test_statistics_are_those_of_the_images():
    norm = nn.BatchNorm2d(3)
    images = 5 + 3 * torch.rand(2, 3, 8, 8)
    set_statistics(norm, images)
    torch.testing.assert_close(norm.running_mean, images.mean((0, 2, 3)))
    assert not norm.training
    assert norm.momentum == 0.1


def test_statistics_are_the_mean_over_all_pieces():
    norm, pieces = nn.BatchNorm2d(3), torch.rand(6, 3, 8, 8).split(2)
    set_statistics(norm, *pieces)
    variances = torch.stack([piece.var((0, 2, 3)) for piece in pieces])
    torch.testing.assert_close(norm.running_var, variances.mean(0))
    torch.testing.assert_close(norm.running_mean, torch.cat(pieces).mean((0, 2, 3)))


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [(1, [2, 2, 2]), (3, [3, 3])],  # at most 2 images at once, but for a batch
)
def test_norms_of_a_random_network_have_the_statistics_of_all_calibrated_images(
    batch, sizes, tmp_path, monkeypatch
):
    """They had the statistics of one image at batch 1, and int8 agreed with nothing."""
    passed = []

    class Norm(nn.BatchNorm2d):
        def forward(self, images):
            passed.append(len(images))
            return super().forward(images)

    monkeypatch.setattr(precision_inputs, "plain_module", lambda config: nn.Sequential(Norm(3)))
    monkeypatch.setattr(precision_inputs, "STATISTICS_PIXELS", 2 * 32 * 32)
    case = PrecisionCase("resnet50", 32, batch)
    options = PrecisionOptions(precisions=("fp32",), calibration=6)
    inputs = make_inputs(case, tmp_path, options)
    images, _ = whole_batch(case.calibration(options.calibration))
    assert len(images) == 6
    assert passed == [*sizes, batch]  # the last one makes the outputs that are expected
    mean = load_file(inputs.weights)["0.running_mean"]
    torch.testing.assert_close(mean, images.mean((0, 2, 3)))


@pytest.mark.parametrize("data", ["", "digits"])
def test_all_calibrate_on_the_same_images(data):
    case = PrecisionCase("resnet50", 32, 3, data)
    own = calibration_of(compose(calibration_words(case, 7)))
    other = case.calibration(7)
    assert own.quant.images == other.batch == 9
    assert own.batch * own.steps == other.batch
    first, _ = whole_batch(dataclasses.replace(own, batch=9))
    torch.testing.assert_close(first, whole_batch(other)[0], rtol=0, atol=0)
    if data:  # what is measured was not calibrated on
        measured, _ = whole_batch(case.config("int8", {}, "", "scales.json"))
        assert not any((image == first).all((1, 2, 3)).any() for image in measured)
