"""Does a longer run go on where a shorter one was saved, as if it had run from the beginning?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from hires.core.errors import PREEMPTED, ConfigError
from hires.core.store import checkpoints, file_names, records
from hires.core.store.reading import read_lines
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


def test_what_a_resume_does_not_take_along_is_said_and_recorded(tmp_path):
    first = make(tmp_path, steps=3, checkpoint={"at_end": "always"})
    assert attempt(first) == [0]
    keys = {"seed": 1, "batch": 4, "optimizer": {"name": "adam"}}
    run = make(tmp_path, steps=6, **keys, checkpoint={"resume": str(first), "every": 2})
    assert attempt(run, stop_at=5) == [PREEMPTED]
    assert attempt(run) == [0]
    events = read_lines(file_names.attempt_dir(run, 0) / "events.jsonl")
    [text] = [event["text"] for event in events if event["event"] == "resume_differs"]
    there = ["seed=0", f"batch={config_at(first).batch}", "optimizer.name=sgd"]
    for word in [*there, "seed=1", "batch=4", "optimizer.name=adam", "exp_avg_sq", first.name]:
        assert word in text
    record = records.read_record(run)
    assert record["resumed"]["checkpoint"] == "step000005"
    [origin] = record["lineage"]
    assert (origin["run"], origin["step"]) == (first.name, 3)
    assert {*there} <= {*origin["differs"]}
