"""Is a network that is read from the file of its integers the one that was quantised?"""

from __future__ import annotations

import dataclasses

import pytest

from hires.cli.calibration import quantised_config
from hires.core.config.run_config import to_dict
from hires.core.store import file_names
from hires.core.store.network_weights import find_weights
from hires.engine.quantised_file import write_quantised
from hires.quant.scales import read_scales, write_scales
from tests.engine.test_calibrate import calibration, folder_of
from tests.helpers.jobs import evaluate_each, run_folders
from tests.helpers.layouts import plan_of
from tests.helpers.ranks import run_ranks


@pytest.mark.dist
def test_ranks_compute_the_same_bits_from_the_file(tmp_path):
    config = calibration(precision={"name": "fp32"})
    path, _ = folder_of(tmp_path, config)
    run_ranks(run_folders, 1, [str(path)])
    place = path / "a0" / file_names.SCALES
    single = quantised_config(config, place)
    file = tmp_path / "n8.safetensors"
    num_bytes = write_quantised(single, plan_of(single), file)
    assert num_bytes["bytes"] < 0.4 * num_bytes["float_bytes"]
    scales = dataclasses.replace(read_scales(place), weights=find_weights(str(file)).digest())
    write_scales(file.with_suffix(".json"), scales)
    assert sorted(p.name for p in tmp_path.glob("n8*")) == ["n8.json", "n8.safetensors"]
    quant = dataclasses.replace(single.quant, scales=None)
    stored = dataclasses.replace(single, batch=4, weights=str(file), quant=quant)
    answers = []
    for tiles in ([1, 1], [2, 1]):
        given = []
        for name, one in (("made", dataclasses.replace(single, batch=4)), ("stored", stored)):
            task = dataclasses.replace(one.task, name="evaluate")
            layout = dataclasses.replace(one.parallel, tiles=[tiles])
            one = dataclasses.replace(one, task=task, parallel=layout, steps=4)
            plan = plan_of(one)
            assert plan.ok, plan.findings
            assert any(fact.recipe for fact in plan.graph.params.values()) == (name == "made")
            given.append((name, to_dict(one), plan.to_dict()))
        [answer, *_] = run_ranks(evaluate_each, tiles[0], given)
        answers += [answer["made"], answer["stored"]]
    assert all(answer == answers[0] for answer in answers)
