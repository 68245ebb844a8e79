"""Does ``hires quantize`` calibrate on what was asked for, find it again, and leave whole files?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hires.core.errors import ConfigError
from hires.launcher.local.local_launcher import Outcome
from hires.plan.plan import Plan
from hires.quant.affine import affine_of
from hires.quant.scales import read_scales
from tests.cli.conftest import SMALL
from tests.cli.verbs.conftest import INT8, NET

pytestmark = pytest.mark.usefixtures("traced")


def test_scales_are_written_and_the_worst_values_shown(hires, ranks):
    answer = hires(*NET, "data=synthetic", "parallel=sp", "out=net.safetensors")
    assert answer.code == 0, answer.err
    assert "no weights=PATH" in answer.err
    assert "made-up images" in answer.err
    [config] = ranks
    assert config["task"]["name"] == "calibrate"
    assert config["steps"] == 3  # of 4 images, for 10
    assert config["parallel"]["tiles"] == [2, 1]
    [worst, *_] = sorted((read_scales("net.json")).noise.items(), key=lambda item: item[1])
    assert worst[0] in answer.out
    assert f"{worst[1]:.1f}" in answer.out
    assert "other operators in int8" in answer.out
    assert "40.0 MiB -> 10.0 MiB" in answer.out
    assert read_scales("net.json").values["input"] == affine_of(-2.0, 2.0)
    calibrated = read_scales("net.json").origin["calibration"]
    assert (calibrated["image"], calibrated["data"]["name"]) == ([32, 32], "synthetic")
    assert [path.name for path in sorted(Path().glob("net*"))] == ["net.json", "net.safetensors"]


@pytest.mark.usefixtures("ranks")
def test_layers_that_stay_in_float_are_none_in_int8(hires, traced):
    """The modules of all quantised nodes were counted: as many with `fc` in float."""
    words = *NET, "data=synthetic", "out=net.safetensors", "--json"
    every = json.loads(hires(*words).out)
    convolutions = sum(node.kind == "conv2d" for node in traced.nodes)
    assert every["quantised"] == convolutions + 1  # and fc
    less = json.loads(hires(*words, "quant.keep=[fc]").out)
    assert less["quantised"] == convolutions
    assert less["quantised_others"] == every["quantised_others"] > 0


def test_an_earlier_calibration_is_found_whatever_its_layout(hires, ranks):
    words = "quant.calibration=noise", "--json"
    first = json.loads(hires(*NET, *words, "out=a.json").out)
    again = hires(*NET, *words, "parallel=sp", "batch=8", "out=b.json")
    assert len(ranks) == 1
    assert json.loads(again.out)["calibration"] == first["calibration"]
    assert "reusing an earlier calibration" in again.err
    assert Path("a.json").read_text() == Path("b.json").read_text()
    hires(*NET, *words, "quant.observer=min_max", "out=c.json")
    hires(*NET, *words, "seed=1", "out=d.json")
    assert len(ranks) == 3
    answer = hires(*NET, *words, "--again", "out=a.json")
    assert answer.code == 0, answer.err + answer.out
    assert len(ranks) == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["out=a.json"], "needs real images and none are named"),
        (["data=synthetic", "quant.images=5000", "out=a.json"], "5000 .*than the 1024 images"),
        (["data=synthetic"], "name one file to write"),
        (["data=synthetic", "out=a.json", "out=b.json"], "name one file to write"),
        (["data=synthetic", "out=a.pt"], "must end in .safetensors"),
        (["data=synthetic", "out=a.json", "quant.auto=2"], "quant.auto=2 is no bound"),
        (["data=synthetic", "out=a.json", "quant.observer=best"], "choose one of entropy"),
        (["data=synthetic", "out=a.json", "quant.percentile=101"], "at most 100"),
        (["quant.data.name=folder", "out=a.json"], "data.path"),
        (["quant.data.colour=red", "out=a.json"], "colour"),
        (["data=synthetic", "quant.scales=b.json", "out=a.json"], "makes scales of its own; leave"),
        (
            ["quant.calibration=noise", "quant.data.name=digits", "out=a.json"],
            "makes its images up, and quant.data.name names others",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_rank_starts(hires, ranks, words, text):
    answer = hires(*NET, *words)
    assert answer.code == 2, answer.err
    assert re.search(text, answer.err), answer.err
    assert ranks == []
    assert not Path("a.json").exists()


def test_a_plan_says_what_a_run_would_do_first(hires, ranks):
    words = "plan", *SMALL, "task=infer", "precision=int8", "quant.images=10"
    assert "needs real images" in hires(*words).out
    answer = hires(*words, "data=synthetic")
    assert answer.code == 0
    assert "a run calibrates on 10 images of data=synthetic first" in answer.out
    assert ranks == []


def test_a_calibration_that_fails_leaves_no_file(hires, monkeypatch):
    failed = Outcome("failed", "rank 0: conv1 cannot be calibrated", {0: 1}, [])
    monkeypatch.setattr("hires.launcher.kinds.this_machine.launch", lambda *a, **k: failed)
    answer = hires(*NET, "data=synthetic", "out=net.json")
    assert answer.code == 1
    *_, last = answer.err.strip().splitlines()
    assert answer.err.count("conv1 cannot be calibrated") == 1
    assert last.endswith("failed, so there are no scales: rank 0: conv1 cannot be calibrated")
    assert not Path("net.json").exists()


def test_a_layer_kept_by_name_stays_in_float_where_the_file_is_read(hires, quantised):
    assert "quant.keep=fc" in quantised.out
    answer = hires(*INT8, "parallel=sp", "--json")
    assert answer.code == 0, answer.err
    plan = Plan.from_dict(json.loads(answer.out))
    assert plan.graph.by_name["fc"].kind == "linear"
    assert not any(fact.recipe for fact in plan.graph.params.values())


def test_a_layer_that_does_not_exist_is_refused(hires, ranks):
    answer = hires(*NET, "data=synthetic", "quant.keep=[no_such]", "out=n8.safetensors")
    assert answer.code == 2
    assert "quant.keep=no_such names no layer" in answer.err
    assert ranks == []
    assert not list(Path().glob("n8*"))


@pytest.mark.usefixtures("quantised")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_integers_need_int8(hires, precision):
    answer = hires(*INT8, f"precision={precision}")
    assert answer.code == 2
    assert "holds a quantised network; use it with task=infer, evaluate, predict" in answer.err


@pytest.mark.parametrize("name", ["net.safetensors", "net.json"])
def test_files_of_others_are_not_overwritten(hires, ranks, name):
    if name == "net.json":
        Path(name).write_text('{"mine": 1}')
    else:
        save_file({"conv1.weight": np.zeros(3, np.float32)}, name)
    before = Path(name).read_bytes()
    answer = hires(*NET, "data=synthetic", "out=net.safetensors")
    assert answer.code == 2
    assert f"{name}, which `hires quantize` has not written; name another file" in answer.err
    assert ranks == []
    assert [path.name for path in Path().glob("net*")] == [name]
    assert Path(name).read_bytes() == before


@pytest.mark.usefixtures("quantised")
def test_an_earlier_pair_is_overwritten(hires):
    answer = hires(*NET, "data=synthetic", "out=n8.safetensors")
    assert answer.code == 0, answer.err
    assert read_scales("n8.json").kept == {}


@pytest.mark.usefixtures("quantised")
def test_scales_that_cannot_be_written_leave_an_earlier_pair(hires, monkeypatch):
    # The weights were replaced first, so both were lost.
    before = {path: Path(path).read_bytes() for path in ("n8.safetensors", "n8.json")}

    def full(path, scales):
        raise ConfigError("cannot write n8.json: No space left on device")

    monkeypatch.setattr("hires.cli.verbs.verb_quantize.write_scales", full)
    answer = hires(*NET, "data=synthetic", "out=n8.safetensors", "quant.keep=[fc]")
    assert answer.code == 2
    assert {path: Path(path).read_bytes() for path in before} == before
    assert not [*Path().glob(".n8*")]


@pytest.mark.usefixtures("quantised")
@pytest.mark.parametrize("verb", ["plan", "run"])
def test_scales_that_are_missing_are_named_and_not_made(hires, ranks, verb):
    Path("n8.json").unlink()
    before = len(ranks)
    answer = hires(verb, *INT8[1:], "data=synthetic")
    assert answer.code == 2
    assert "n8.json with its scales is missing; copy it from where" in answer.err
    assert "calibrating" not in answer.err
    assert len(ranks) == before


def test_another_json_beside_float_weights_is_left_alone(hires, traced):
    names = traced.own_params(name for node in traced.nodes for name in node.params)
    facts = {name: traced.params[name] for name in names}
    save_file({n: np.zeros(f.shape, f.dtype) for n, f in facts.items()}, "mine.safetensors")
    Path("mine.json").write_text('{"epochs": 90}')
    answer = hires("plan", *SMALL, "task=infer", "weights=mine.safetensors")
    assert answer.code == 0, answer.err
