"""Has the map of a slide that was predicted in tiles no seam?"""

from __future__ import annotations

import numpy as np
import pytest
import tifffile

from hires.data.slide_shapes import make_slides
from tests.engine.test_predict import made, prediction
from tests.helpers.jobs import run_folders
from tests.helpers.ranks import run_ranks

SIZE = (150, 204)
SEAM = (75, 102)
"""Row and column at which the tiles meet."""
MARGIN = 24
"""Pixels around a crop that its outputs depend on: 4 + 8 of the convolutions of two levels, and a
pixel of the coarser one at each way."""


def map_of(folder, slide, **keys):
    """Returns the run folder of a prediction of a slide, or of a region of it, as one image."""
    data = {"name": "slide", "path": str(slide), "cut": "whole"}
    net = {"model": {"name": "unet", "levels": 2, "width": 4, "classes": 4}, "batch": 1}
    region = keys.pop("region", None)
    return made(folder, prediction(**net, **keys, data={**data, "region": region}))


@pytest.mark.dist
def test_crop_around_the_seam_is_that_of_one_process(tmp_path):
    assert make_slides(tmp_path / "slides", 2, 2, SIZE, 0) == 2
    slide = tmp_path / "slides" / "slides" / "000.tif"
    # Corners divide by 4, the stride of the network: its coarse pixels are those of the slide.
    row, col = SEAM[0] // 4 * 4 - 32, SEAM[1] // 4 * 4 - 32
    whole = map_of(tmp_path, slide, image=[*SIZE], parallel={"tiles": [2, 2]})
    crop = map_of(tmp_path, slide, image=[64, 64], region=[row, col, 64, 64])
    run_ranks(run_folders, 4, [str(whole)])
    run_ranks(run_folders, 1, [str(crop)])
    [big], [small] = (
        [tifffile.imread(file) for file in (path / "a0" / "predictions").iterdir()]
        for path in (whole, crop)
    )
    assert big.shape == (4, *SIZE)
    inner = slice(MARGIN, 64 - MARGIN)
    found = big[:, row : row + 64, col : col + 64][:, inner, inner]
    assert row + MARGIN < SEAM[0] < row + 64 - MARGIN
    assert col + MARGIN < SEAM[1] < col + 64 - MARGIN
    np.testing.assert_allclose(found, small[:, inner, inner], atol=1e-6)
    assert (found.argmax(0) == small[:, inner, inner].argmax(0)).all()
    assert found.std() > 1e-3
