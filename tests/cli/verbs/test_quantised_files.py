"""Is the file of a quantised network read in any layout as it is, and refused if it was changed?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hires.core.store.network_weights import find_weights
from hires.plan.plan import Plan
from hires.quant.scales import read_scales
from tests.cli.verbs.conftest import INT8, NET

pytestmark = pytest.mark.usefixtures("traced")


def saved(tensors):
    with safe_open("n8.safetensors", framework="np") as file:
        facts = file.metadata()
    save_file(tensors, "n8.safetensors", facts)


def with_digest(**changed):
    """Makes the scales name the file that is there now."""
    held = json.loads(Path("n8.json").read_text())
    held["weights"] = find_weights("n8.safetensors").digest()
    Path("n8.json").write_text(json.dumps({**held, **changed}))


def changed(dtype, change):
    """Changes the first tensor of a type in a file whose digest fits; returns its name."""
    tensors = load_file("n8.safetensors")
    name = next(n for n, one in tensors.items() if one.dtype == dtype)
    saved({**tensors, name: change(tensors[name])})
    with_digest()
    return name


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint8])
@pytest.mark.usefixtures("quantised")
def test_numbers_of_another_type_are_refused_though_their_digest_fits(hires, dtype):
    name = changed(np.int8, lambda one: one.astype(dtype))
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
    name = changed(np.uint8, lambda one: np.ascontiguousarray(one[:, 1:]))
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
