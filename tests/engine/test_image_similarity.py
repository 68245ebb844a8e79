"""Is SSIM that of Wang et al., as other libraries compute it?"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hires.engine import image_similarity
from hires.engine.image_similarity import similarity_sum
from hires.engine.live_bytes import LiveBytes
from tests.helpers.reference import structural_similarity


def images():
    """Returns two similar images of the sizes of a network's output, from -2 to 2."""
    generator = torch.Generator().manual_seed(2)
    wanted = torch.rand(3, 17, 23, generator=generator).double() * 4 - 2
    return wanted + 0.5 * torch.randn(3, 17, 23, generator=generator), wanted


def test_similarity_is_that_of_the_reference():
    made, wanted = images()
    found = similarity_sum(made, wanted) / (3 * 7 * 13)
    a, b = ((one.clamp(-2, 2).numpy() + 2) / 4 for one in (made, wanted))
    assert found == pytest.approx(structural_similarity(a, b), rel=1e-12)
    assert similarity_sum(wanted, wanted) == pytest.approx(3 * 7 * 13, rel=1e-12)


def test_similarity_is_that_of_other_libraries():
    made, wanted = images()
    a, b = ((one.clamp(-2, 2) + 2) / 4 for one in (made, wanted))
    found = similarity_sum(made, wanted) / (3 * 7 * 13)
    metrics = pytest.importorskip("skimage.metrics", reason="needs scikit-image")
    keys = {"gaussian_weights": True, "use_sample_covariance": False, "data_range": 1.0}
    theirs = metrics.structural_similarity(a.numpy(), b.numpy(), channel_axis=0, **keys)
    assert found == pytest.approx(float(theirs), rel=1e-10)
    library = pytest.importorskip("torchmetrics.functional.image", reason="needs torchmetrics")
    every = library.structural_similarity_index_measure
    _, found_each = every(a[None], b[None], data_range=1.0, return_full_image=True)
    # It adds windows that reach over the border, onto a mirrored image.
    assert found == pytest.approx(float(found_each[..., 5:-5, 5:-5].mean()), rel=1e-10)


def test_numbers_that_are_not_finite_have_no_similarity():
    made, wanted = images()
    made[1, 8, 8] = math.inf
    assert math.isnan(similarity_sum(made, wanted))
    assert similarity_sum(made[:, :10], wanted[:, :10]) == 0.0
    assert np.isfinite(similarity_sum(made[:1], wanted[:1]))


@pytest.mark.parametrize("side", [1, 3, 7, 100])
def test_blocks_have_the_sum_of_the_whole(side, monkeypatch):
    monkeypatch.setattr(image_similarity, "_SIDE", side)
    made, wanted = images()
    before = made.clone(), wanted.clone()
    a, b = ((one.clamp(-2, 2).numpy() + 2) / 4 for one in (made, wanted))
    found = similarity_sum(made, wanted) / (3 * 7 * 13)
    assert found == pytest.approx(structural_similarity(a, b), rel=1e-12)
    assert torch.equal(made, before[0])  # also in float64, where no copy is needed
    assert torch.equal(wanted, before[1])


def test_memory_does_not_grow_with_the_image():
    # 11 copies of the image in float64 were there at once, and none of them in the prediction.
    for rows, cols in ((300, 400), (900, 700)):
        made, wanted = torch.rand(3, rows, cols), torch.rand(3, rows, cols)
        with LiveBytes() as live:
            live.assign([made, wanted], "buffers")
            given = live.peak_bytes
            similarity_sum(made, wanted)
        assert live.peak_bytes - given < 6 * 2**20
