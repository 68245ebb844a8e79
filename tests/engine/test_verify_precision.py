"""Is a layout in low precision within the derived bound, and what is wrong outside of it?"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hires.core.config.run_config import to_dict
from hires.engine.verify import summary
from hires.engine.verify_bounds import EXACT, MOST, bounds_of, coarsest
from hires.plan.tuning_table import TuningRule
from tests.helpers.codec_jobs import BOUNDED, trained_parameters
from tests.helpers.jobs import verify, wrong_verify
from tests.helpers.layouts import config_of, plan_of, verified
from tests.helpers.parity_rows import rows
from tests.helpers.pool import POOL, SIMULATED
from tests.helpers.ranks import run_ranks

EDSR: dict[str, Any] = {"model": {"name": "edsr", "blocks": 2, "width": 6}, "image": [24, 22]}
SMALL: dict[str, Any] = {"model": {"name": "edsr", "blocks": 1, "width": 4}, "image": [16, 14]}
TILES = {"tiles": [2, 1]}
ALL = {"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "microbatches": 2}


def test_bound_is_that_of_the_coarsest_type():
    def bounds(precision: str, codec: str = "none"):
        config = config_of(**SMALL, precision={"name": precision}, comm={"codec": codec})
        return bounds_of(config, plan_of(config))

    assert bounds("fp64") is EXACT
    bf16, fp16, fp32 = bounds("bf16"), bounds("fp16"), bounds("fp32")
    assert bf16.by_kind["output"] == pytest.approx(8 * fp16.by_kind["output"])
    assert MOST > bf16.by_kind["gradients"] > 2 * fp16.by_kind["gradients"]
    assert fp32.by_kind["output"] < 1e-5
    # Of a codec every message counts, here those of sums and updates: 2^-8 three times.
    coded = bounds("fp64", "bf16").by_kind
    assert coded["output"] == 4 * math.sqrt(3) * 2.0**-8
    assert 3 * coded["output"] < bounds("fp64", "int8").by_kind["output"] < 4 * coded["output"]
    assert bf16.by_kind["output"] < bounds("bf16", "bf16").by_kind["output"]
    assert bounds("bf16", "fp32").by_kind == pytest.approx(bf16.by_kind)
    assert coarsest(config_of(precision={"name": "fp32"})) == "fp32"


@pytest.mark.dist
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_layout_is_within_the_bound(precision: str, tmp_path):
    answer = verified(tmp_path, **SMALL, precision={"name": precision}, parallel=ALL)
    assert answer["ok"], answer
    assert answer["precision"] == precision
    assert not answer["undecided"]


@pytest.mark.dist
@pytest.mark.parametrize("codec", BOUNDED)
def test_coded_messages_are_within_the_bound_of_the_codec(codec: str, tmp_path):
    # In float64 nothing else is rounded, so what differs shows that messages were.
    answer = verified(tmp_path, **SMALL, parallel=ALL, comm={"codec": codec})
    assert answer["ok"], answer
    assert answer["codecs"] == [codec]
    assert answer["errors"]["output"] > 1e-9
    assert answer["errors"]["gradients"] > 1e-9


ROWS = {**rows("mpi"), **{n: r for n, r in rows().items() if "scattered" in n or "published" in n}}
CODED = [
    (name, codec)
    for name, codec in zip(ROWS, itertools.cycle(("int8", "bf16", "fp16")), strict=False)
    if "adam" not in name and "at once" not in name  # which a codec of gradients refuses
]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "codec"), CODED)
def test_every_layout_with_coded_messages_is_within_the_bound(name, codec, tmp_path):
    _, config, plan, folder = ROWS[name].given(tmp_path, comm={"codec": codec})
    answer = POOL.run(verify, plan["world"], config, plan, folder)[0]
    assert answer["ok"], answer["worst"]
    kind = "gradients" if config["parallel"]["replicas"] > 1 else "output"
    assert answer["errors"][kind] > 1e-9


@pytest.mark.dist
@pytest.mark.parametrize("codec", ["int8", {"gradient": "fp8", "halo": "fp16"}])
def test_messages_of_a_device_that_is_no_cpu_are_coded_there(codec, tmp_path):
    row = ROWS["sp+gems"]
    _, config, plan, folder = row.given(tmp_path, comm={"codec": codec}, device="simulated")
    answer = SIMULATED.run(verify, plan["world"], config, plan, folder)[0]
    assert answer["ok"], answer["worst"]


@pytest.mark.dist
@pytest.mark.parametrize(
    "codec", [{"gradient": "int8", "parameters": "int8"}, {"parameters": "bf16"}]
)
@pytest.mark.parametrize("name", ["dp", "scattered, dp", "published, sp+gems"])
def test_copies_of_coded_parameters_stay_equal_bit_by_bit_and_learn(name, codec):
    # Updates are coded, not parameters: those that are small beside a parameter are not lost.
    row = ROWS[name]
    trained = []
    for setting in (codec, "none"):
        config = row.config(comm={"codec": setting}, precision={"name": "fp32"})
        planned = row.plan(config)
        if name.startswith("published"):  # broadcasts, here along a chain
            chain = TuningRule("gloo:segmented:1KiB", ["broadcast"])
            planned = replace(planned, routes=[chain, *planned.routes])
        plan = planned.to_dict()
        answers = run_ranks(trained_parameters, plan["world"], to_dict(config), plan)
        after = {name: tensor for _, own in answers for name, tensor in own.items()}
        assert all(torch.equal(own[name], after[name]) for _, own in answers for name in own)
        before = {name: tensor for own, _ in answers for name, tensor in own.items()}
        trained.append({name: after[name] - before[name] for name in after})
    for name, change in trained[0].items():
        exact = trained[1][name]
        assert (change - exact).norm() < 0.2 * exact.norm() + 1e-6, name


@pytest.mark.dist
@pytest.mark.parametrize(("precision", "fault"), [("bf16", "halo"), ("fp16", "average")])
def test_fault_exceeds_the_bound(precision: str, fault: str, tmp_path):
    config = config_of(**EDSR, precision={"name": precision}, parallel=TILES)
    plan = plan_of(config)
    given = (to_dict(config), plan.to_dict(), str(tmp_path), fault)
    answer = run_ranks(wrong_verify, plan.world, *given)[0]
    assert not answer["ok"]
    kind = {"halo": "output", "average": "gradients"}[fault]
    assert answer["errors"][kind] > answer["worst"][kind]["bound"]


def test_tensor_that_one_process_loses_is_named_and_not_judged():
    errors = {"gradients/a": 1.2, "gradients/b": 0.3, "output/0": 0.05}
    bounds = EXACT._replace(by_kind=dict.fromkeys(EXACT.by_kind, 0.1), noise_factor=3, most=MOST)

    def judged(**noise: float):
        named = {f"gradients/{name}": own for name, own in noise.items()}
        return summary([{"rank": 0, "errors": errors}], [*errors], named, bounds)

    answer = judged(a=0.5, b=0.12)
    assert answer["ok"]
    assert (answer["undecided"], answer["by_noise"]) == (["gradients/a"], ["gradients/b"])
    assert answer["worst"]["gradients"]["name"] == "gradients/b"
    assert not judged(a=0.15, b=0.12)["ok"]
    assert not judged(a=math.inf, b=0.12)["ok"]  # where it overflows it says nothing
    errors["gradients/a"] = 0.5  # averaged over two tiles: within thrice this noise, and wrong
    assert not judged(a=0.17, b=0.12)["ok"]
