"""Does a calibration on real ranks see the weights that the run will have?"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.dist
def test_scales_are_those_of_the_weights_that_a_checkpoint_gives(hires):
    # They were those of the first weights of the seed.
    keys = "model=resnet18", "image=32", "data=digits", "model.channels=1", "batch=4"
    trained = hires("run", *keys, "steps=3", "checkpoint.every=3", "campaign=net")
    assert trained.code == 0, trained.err
    [run] = Path("results/net").iterdir()
    of_int8 = *keys, "task=infer", "precision=int8", "quant.images=8", "steps=3"
    first = hires("run", *of_int8, f"checkpoint.resume={run}", "parallel=sp")
    assert "calibrating on 8 images" in first.err, first.err
    second = hires("run", *of_int8, f"weights={run}")
    assert "reusing an earlier calibration" in second.err
    third = hires("quantize", *keys, "quant.images=8", f"checkpoint.resume={run}", "out=n8.json")
    assert "reusing an earlier calibration" in third.err
    assert "warning: no weights" not in third.err
