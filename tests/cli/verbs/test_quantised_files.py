"""The file of a quantised network is read in any layout as it is, and refused if it was changed."""

from __future__ import annotations

import json
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


@pytest.fixture
def quantise(hires, ranks):
    """Returns what writes n8.safetensors with some further keys."""

    def run(*words: str) -> str:
        answer = hires(*NET, "data=synthetic", *words, "out=n8.safetensors")
        assert answer.code == 0, answer.err
        return answer.out

    return run


def damage(name: str, dtype: type) -> str:
    """Damages the pair of files; returns the name of the tensor that was changed."""
    tensors, file = load_file("n8.safetensors"), Path("n8.safetensors")
    weight = next(n for n, one in tensors.items() if one.dtype == dtype)
    held = json.loads(Path("n8.json").read_text())
    if name == "truncated":
        file.write_bytes(file.read_bytes()[:-7])
    elif name == "other numbers":
        save_file({**tensors, weight: tensors[weight] + dtype(1)}, file)
    elif name.startswith("a tensor less"):
        saved({n: one for n, one in tensors.items() if n != weight})
    elif name == "another network":
        Path("n8.json").write_text(json.dumps({**held, "network": "0" * 16}))
    elif name == "half the scales":
        text = Path("n8.json").read_text()
        Path("n8.json").write_text(text[: len(text) // 2])
    elif name == "other type, digest fits":
        saved({**tensors, weight: tensors[weight].astype(np.float32)})
    elif name == "other width, digest fits":
        saved({**tensors, weight: np.ascontiguousarray(tensors[weight][:, 1:])})
    elif name == "no scales named, digest fits":
        save_file(tensors, file)
    if name.endswith("digest fits"):
        with_digest()
    if name == "other scales, digest is right":
        scale, zero_point = held["values"]["input"]
        with_digest(values={**held["values"], "input": [3 * scale, zero_point]})
    return weight


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("truncated", "not the file that the scales beside it"),
        ("other numbers", "not the file that the scales beside it"),
        ("a tensor less", "not the file that the scales beside it"),
        ("a tensor less, digest fits", "1 missing; "),
        ("another network", "are of another network"),
        ("half the scales", "no whole JSON"),
        ("other type, digest fits", "other types: WEIGHT is float32 there and int8 here"),
        ("other width, digest fits", "(WEIGHT is ["),
        ("no scales named, digest fits", "does not say which scales belong to it"),
        ("other scales, digest is right", "are not those that it was written with"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(hires, quantise, name, text):
    quantise()
    weight = damage(name, np.int8)
    answer = hires(*INT8)
    assert answer.code == 2
    assert text.replace("WEIGHT", weight) in answer.err


def test_order_of_the_scales_makes_no_difference(hires, quantise):
    quantise()
    held = json.loads(Path("n8.json").read_text())
    with_digest(values=dict(reversed(held["values"].items())))
    assert hires(*INT8).code == 0


@pytest.mark.parametrize("kind", ["quant.weights=int4", "quant.linear=dynamic"])
def test_file_of_another_kind_is_read_in_any_layout_as_it_is(hires, ranks, quantise, kind):
    shown = quantise(kind)
    tensors = load_file("n8.safetensors")
    for layout in ("single", "sp", "pp"):
        answer = hires(*INT8, f"parallel={layout}", "--json")
        assert answer.code == 0, answer.err
        graph = Plan.from_dict(json.loads(answer.out)).graph
        stored = {n: one.shape for n, one in graph.params.items() if one.recipe is None}
        assert {n: list(one.shape) for n, one in tensors.items()} == stored
    if kind == "quant.linear=dynamic":
        assert "linear ones with a scale for each row" in shown
        assert graph.by_name["fc"].kind == "q_dynamic_linear"
        assert tensors["fc:weight8"].dtype == np.int8
    else:
        made = [one for one in graph.params.values() if one.recipe is not None]
        assert {one.recipe["make"] for one in made} == {"unpacked_weight"}
        packed = sum(one.nbytes for one in tensors.values() if one.dtype == np.uint8)
        assert 0.5 < packed / sum(one.num_elements for one in made) < 0.52
    # The calibration serves a file of the usual kind, too.
    assert hires(*NET, "data=synthetic", "out=b.safetensors").code == 0
    assert len(ranks) == 1
    assert read_scales("n8.json").values == read_scales("b.json").values
    if kind == "quant.weights=int4":
        damage("other numbers", np.uint8)
        assert "not the file that the scales beside it" in hires(*INT8).err
