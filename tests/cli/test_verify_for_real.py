"""Does ``hires verify`` find real ranks equal to one process, with nothing replaced?"""

from __future__ import annotations

import json

import pytest

TINY = ("model=preact_resnet", "model.n=1", "image=[37,33]", "batch=4")


@pytest.mark.dist
def test_uneven_tiles_equal_one_process(hires):
    answer = hires("verify", *TINY, "parallel=sp+pp", "parallel.tiles=[1,2]", "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["ok"] is True
    assert found["max_rel_err"] <= 1e-10
    assert {"output", "loss", "gradients", "parameters", "running_stats"} <= set(found["errors"])
