"""Is a network that is read from the file of its integers the one that was quantised?"""

from __future__ import annotations

import dataclasses

import pytest
from safetensors.torch import load_file

from hires.cli.calibration import quantised_config
from hires.core.config.fields import build
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import to_dict
from hires.core.store import file_names
from hires.core.store.network_weights import find_weights
from hires.engine.footprint import footprint
from hires.engine.network_files import output_noise, write_quantised
from hires.plan.operators.operator_facts import facts_of
from hires.quant.scales import read_scales, write_scales
from tests.helpers.evaluations import calibration
from tests.helpers.jobs import evaluate_each, run_folders, verify
from tests.helpers.layouts import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import run_folder

NET = {"model": {"name": "preact_resnet", "depth": 11, "classes": 4}}


@pytest.mark.dist
def test_ranks_compute_the_same_bits_from_the_file(tmp_path):
    config = calibration(precision={"name": "fp32"}, **NET)
    path = run_folder(tmp_path, config)
    run_ranks(run_folders, 1, [str(path)])
    place = path / "a0" / file_names.SCALES
    single = quantised_config(config, place)
    chosen = dataclasses.replace(single.quant, linear="dynamic", weights="int7")
    single = dataclasses.replace(single, quant=chosen)
    file = tmp_path / "n8.safetensors"
    plan = plan_of(single)
    facts = write_quantised(single, plan, file, "0" * 16)
    assert facts["bytes"] < 0.4 * facts["float_bytes"]
    assert file.stat().st_size < 1.2 * facts["bytes"]
    layers = [n.name for n in plan.graph.nodes if facts_of(n.kind).multiplies]
    assert set(facts["weight_noise_db"]) == set(layers) - set(plan.graph.kept)
    assert min(facts["weight_noise_db"].values()) > 25
    assert max(t.max() for n, t in load_file(file).items() if n.endswith("weight8")) == 63
    quants = {w: dataclasses.replace(chosen, weights=w) for w in ("int8", "int7")}
    plans = {w: plan_of(dataclasses.replace(single, quant=one)) for w, one in quants.items()}
    found = output_noise(single, plans)
    noise = {name: ratio for name, (ratio, _) in found.items()}
    assert all(0.5 <= same <= 1 for _, same in found.values())
    assert 20 < noise["int7"] < noise["int8"] < noise["int7"] + 7  # a bit is 6 dB, of weights alone
    digest = find_weights(str(file)).digest()
    facts = {"weights": digest, "linear": "dynamic", "weight_type": "int7"}
    scales = dataclasses.replace(read_scales(place), **facts)
    write_scales(file.with_suffix(".json"), scales)
    assert sorted(p.name for p in tmp_path.glob("n8*")) == ["n8.json", "n8.safetensors"]
    # The file has its own.
    quant = dataclasses.replace(single.quant, scales=None, linear="static", weights="int8")
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
            makes = {(fact.recipe or {}).get("make") for fact in plan.graph.params.values()}
            assert ("quantized_multiplier" in makes) == (name == "made")
            kinds = {node.kind for node in plan.graph.nodes}
            assert "q_dynamic_linear" in kinds
            given.append((name, to_dict(one), plan.to_dict()))
            if name == "stored":
                # The front end rehearses it, on tensors without numbers.
                memory = footprint(one, plan)
                assert len(memory) == tiles[0]
                assert all(rank.params_bytes > 0 for rank in memory)
        [answer, *_] = run_ranks(evaluate_each, tiles[0], given)
        answers += [answer["made"], answer["stored"]]
    assert all(answer == answers[0] for answer in answers)
    # It is compared with one process that reads the same file, which has no float weights.
    for layout in ({"tiles": [2, 1]}, {"stages": 2, "microbatches": 2}):
        task = dataclasses.replace(stored.task, name="infer")
        parallel = build(ParallelConfig, layout)
        one = dataclasses.replace(stored, task=task, parallel=parallel)
        folder = tmp_path / str(layout)
        folder.mkdir()
        answer = run_ranks(verify, 2, to_dict(one), plan_of(one).to_dict(), str(folder))[0]
        assert answer["verdict"] == "equal"
        assert answer["errors"]["output"] == 0
