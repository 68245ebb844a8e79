"""Does a longer run go on where a shorter one was saved, as if it had run from the beginning?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from hires.core.errors import ConfigError
from hires.core.store import checkpoints, records
from tests.helpers.run_folders import saved_stages
from tests.helpers.saved import attempt, config_at, losses, make

TILES = {"tiles": [2, 1]}


def saved(run, step):
    return {p.name: load_file(p) for p in checkpoints.place(run, step).glob("*.safetensors")}


def test_longer_run_is_bitwise_equal_to_the_uninterrupted_one(tmp_path):
    every = {"checkpoint": {"every": 2, "at_end": "never"}, "parallel": TILES}
    whole = make(tmp_path / "whole", steps=6, **every)
    first = make(tmp_path / "parts", steps=3, **every)
    assert [attempt(whole), attempt(first)] == [[0, 0], [0, 0]]
    runs = [first]
    for steps in (5, 6):  # 2 steps of the first run, then 2 of the second
        place = checkpoints.place(runs[-1], checkpoints.saved_step(runs[-1]))
        saving = {**every["checkpoint"], "continues": str(place)}
        runs.append(make(tmp_path / "parts", **{**every, "steps": steps, "checkpoint": saving}))
        assert attempt(runs[-1]) == [0, 0]
    ours, theirs = saved(runs[-1], 6), saved(whole, 6)
    assert ours.keys() == theirs.keys()
    for name, tensors in ours.items():
        assert tensors.keys() == theirs[name].keys()
        assert all(torch.equal(tensor, theirs[name][key]) for key, tensor in tensors.items())
    last = {key: loss for key, loss in losses(whole, 0).items() if key[0] >= 4}
    assert losses(runs[-1], 0) == last
    record = records.read_record(runs[-1])
    assert record["state"] == "done"
    assert record["resumed"]["step"] == 4
    assert record["lineage"] == [
        {"run": runs[1].name, "step": 4},
        {"run": runs[0].name, "step": 2},
    ]


@pytest.mark.parametrize("keys", [{"seed": 1}, {"batch": 4}, {"parallel": {"stages": 2}}])
def test_run_that_differs_in_more_is_not_continued(tmp_path, keys):
    run = make(tmp_path, steps=3, parallel=TILES)
    other = make(tmp_path, **{"parallel": TILES, "steps": 6, **keys})
    config = config_at(other)
    place = saved_stages([], run, 2)
    saving = replace(config.checkpoint, continues=str(place))
    with pytest.raises(ConfigError, match="differs in more than its steps"):
        checkpoints.candidates(other, replace(config, checkpoint=saving))
