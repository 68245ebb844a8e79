"""Does ``hires quantize`` calibrate on what was asked for, find it again, and leave whole files?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hires.core.errors import ConfigError
from hires.core.store.network_weights import find_weights
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


def saved(tensors):
    with safe_open("n8.safetensors", framework="np") as file:
        facts = file.metadata()
    save_file(tensors, "n8.safetensors", facts)


def with_digest(**changed):
    """Makes the scales name the file that is there now."""
    held = json.loads(Path("n8.json").read_text())
    held["weights"] = find_weights("n8.safetensors").digest()
    Path("n8.json").write_text(json.dumps({**held, **changed}))


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint8])
@pytest.mark.usefixtures("quantised")
def test_numbers_of_another_type_are_refused_though_their_digest_fits(hires, dtype):
    tensors = load_file("n8.safetensors")
    name = next(n for n, one in tensors.items() if one.dtype == np.int8)
    saved({**tensors, name: tensors[name].astype(dtype)})
    with_digest()
    answer = hires(*INT8)
    assert answer.code == 2
    assert f"other types: {name} is {np.dtype(dtype).name} there and int8 here" in answer.err


@pytest.mark.usefixtures("quantised")
def test_scales_with_which_the_weights_were_not_written_are_refused(hires):
    held = json.loads(Path("n8.json").read_text())
    with_digest(values=dict(reversed(held["values"].items())))
    assert hires(*INT8).code == 0  # the order makes no difference
    scale, zero_point = held["values"]["input"]
    with_digest(values={**held["values"], "input": [3 * scale, zero_point]})
    answer = hires(*INT8)
    assert answer.code == 2
    assert "the scales beside it are not those that it was written with" in answer.err


@pytest.mark.usefixtures("quantised")
def test_a_file_that_names_no_scales_is_refused(hires):
    save_file(load_file("n8.safetensors"), "n8.safetensors")
    with_digest()
    answer = hires(*INT8)
    assert answer.code == 2
    assert "does not say which scales belong to it" in answer.err
    assert "make both again with `hires quantize`" in answer.err


def damage(name, dtype=np.int8):
    tensors, file = load_file("n8.safetensors"), Path("n8.safetensors")
    weight = next(n for n, one in tensors.items() if one.dtype == dtype)
    if name == "truncated":
        file.write_bytes(file.read_bytes()[:-7])
    elif name == "other numbers":
        save_file({**tensors, weight: tensors[weight] + dtype(1)}, file)
    elif name == "a tensor less":
        del tensors[weight]
        saved(tensors)
    elif name == "another network":
        held = json.loads(Path("n8.json").read_text())
        Path("n8.json").write_text(json.dumps({**held, "network": "0" * 16}))
    elif name == "half the scales":
        text = Path("n8.json").read_text()
        Path("n8.json").write_text(text[: len(text) // 2])
    return weight


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("truncated", "not the file that the scales beside it"),
        ("other numbers", "not the file that the scales beside it"),
        ("a tensor less", "not the file that the scales beside it"),
        ("another network", "are of another network"),
        ("half the scales", "no whole JSON"),
    ],
)
@pytest.mark.usefixtures("quantised")
def test_files_that_do_not_belong_together_are_refused(hires, name, text):
    damage(name)
    answer = hires(*INT8)
    assert answer.code == 2
    assert text in answer.err


@pytest.mark.usefixtures("quantised")
def test_a_file_that_lacks_a_tensor_is_refused_though_its_digest_fits(hires):
    damage("a tensor less")
    with_digest()
    answer = hires(*INT8)
    assert answer.code == 2
    assert "1 missing; " in answer.err
    assert "model.classes and engine.fuse with which it was quantised" in answer.err


@pytest.fixture
def quantised4(hires, ranks):
    words = "data=synthetic", "quant.weights=int4", "out=n8.safetensors"
    answer = hires(*NET, *words)
    assert answer.code == 0, answer.err
    return answer


@pytest.mark.usefixtures("quantised4")
@pytest.mark.parametrize("layout", ["single", "sp", "pp"])
def test_a_file_of_4_bits_is_read_in_any_layout_as_it_is(hires, layout):
    answer = hires(*INT8, f"parallel={layout}", "--json")
    assert answer.code == 0, answer.err
    params = Plan.from_dict(json.loads(answer.out)).graph.params
    tensors = load_file("n8.safetensors")
    assert {n: list(one.shape) for n, one in tensors.items()} == {
        name: fact.shape for name, fact in params.items() if fact.recipe is None
    }
    for name, fact in params.items():
        assert fact.dtype != "uint8" or list(tensors[name].shape) == fact.shape
        assert fact.recipe is None or fact.recipe["make"] == "unpacked_weight"
    packed = sum(one.nbytes for one in tensors.values() if one.dtype == np.uint8)
    numbers = sum(one.num_elements for one in params.values() if one.recipe is not None)
    assert 0.5 * numbers < packed < 0.52 * numbers


def test_weights_of_4_bits_are_shown_with_what_rounding_does(quantised4):
    assert "Layers whose weights are rounded most" in quantised4.out
    assert re.search(r"conv1 +40\.2", quantised4.out)
    packed = sum(one.dtype == np.uint8 for one in load_file("n8.safetensors").values())
    assert f"{packed} of them with weights of 4 bits" in quantised4.out


def test_calibrations_serve_weights_of_any_type(hires, ranks, quantised4):
    assert hires(*NET, "data=synthetic", "out=b.safetensors").code == 0
    assert len(ranks) == 1
    first, second = (read_scales(f"{name}.json") for name in ("n8", "b"))
    assert first.values == second.values
    assert (first.weight_type, second.weight_type) == ("int4", "int8")


@pytest.mark.parametrize("name", ["truncated", "other numbers", "a tensor less"])
@pytest.mark.usefixtures("quantised4")
def test_a_file_of_4_bits_that_was_changed_is_refused(hires, name):
    damage(name, np.uint8)
    answer = hires(*INT8)
    assert answer.code == 2
    assert "not the file that the scales beside it" in answer.err


@pytest.mark.usefixtures("quantised4")
def test_numbers_of_another_width_are_refused_though_their_digest_fits(hires):
    tensors = load_file("n8.safetensors")
    name = next(n for n, one in tensors.items() if one.dtype == np.uint8)
    saved({**tensors, name: np.ascontiguousarray(tensors[name][:, 1:])})
    with_digest()
    answer = hires(*INT8)
    assert answer.code == 2
    assert f"({name} is [64, 76] there and [64, 77] here)" in answer.err


@pytest.mark.usefixtures("quantised")
def test_a_file_of_8_bits_is_not_read_as_one_of_4(hires):
    answer = hires(*INT8, "quant.weights=int4")
    assert answer.code == 2
    assert "which holds 8-bit weights; leave it out" in answer.err


@pytest.fixture
def dynamic(hires, ranks):
    answer = hires(*NET, "data=synthetic", "quant.linear=dynamic", "out=n8.safetensors")
    assert answer.code == 0, answer.err
    return answer


@pytest.mark.parametrize("layout", ["single", "sp", "pp"])
def test_a_file_of_dynamic_linear_layers_is_read_in_any_layout(hires, dynamic, layout):
    assert "linear ones with a scale for each row" in dynamic.out
    answer = hires(*INT8, f"parallel={layout}", "--json")
    assert answer.code == 0, answer.err
    graph = Plan.from_dict(json.loads(answer.out)).graph
    assert graph.by_name["fc"].kind == "q_dynamic_linear"
    tensors = load_file("n8.safetensors")
    assert {n: list(one.shape) for n, one in tensors.items()} == {
        name: fact.shape for name, fact in graph.params.items()
    }
    assert tensors["fc:weight8"].dtype == np.int8
    assert hires(*INT8, f"parallel={layout}", "quant.linear=dynamic").code == 0


@pytest.mark.usefixtures("dynamic")
def test_calibrations_serve_linear_layers_of_either_kind(hires, ranks):
    assert hires(*NET, "data=synthetic", "out=b.safetensors").code == 0
    assert len(ranks) == 1
    first, second = (read_scales(f"{name}.json") for name in ("n8", "b"))
    assert first.values == second.values
    assert (first.linear, second.linear) == ("dynamic", "static")


@pytest.mark.usefixtures("quantised")
def test_a_file_of_static_linear_layers_is_not_read_as_one_of_dynamic_ones(hires):
    answer = hires(*INT8, "quant.linear=dynamic")
    assert answer.code == 2
    assert "which holds linear layers with static scales; leave it out, make another" in answer.err


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
