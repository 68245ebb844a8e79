"""The file of a quantised network is read in any layout as it is, and refused if it was changed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hires.core.store.network_weights import find_weights
from hires.plan.plan import Plan
from hires.quant.scales import read_scales
from tests.helpers.commands import INT8, QUANTIZE

FILE, SCALES = Path("n8.safetensors"), Path("n8.json")


def with_digest(**changed):
    """Makes the scales name the file that is there now."""
    values = json.loads(SCALES.read_text())
    values["weights"] = find_weights(str(FILE)).digest()
    SCALES.write_text(json.dumps({**values, **changed}))


def damage(name: str, dtype: type) -> str:
    """Damages the pair of files; returns the name of the tensor that was changed."""
    tensors = load_file(FILE)
    with safe_open(FILE, framework="np") as file:
        facts = file.metadata()
    weight = next(n for n, tensor in tensors.items() if tensor.dtype == dtype)
    values = json.loads(SCALES.read_text())
    if name == "truncated":
        FILE.write_bytes(FILE.read_bytes()[:-7])
    elif name == "other numbers":
        save_file({**tensors, weight: tensors[weight] + dtype(1)}, FILE)
    elif name.startswith("a tensor less"):
        save_file({n: tensor for n, tensor in tensors.items() if n != weight}, FILE, facts)
    elif name == "another network":
        SCALES.write_text(json.dumps({**values, "network": "0" * 16}))
    elif name == "half the scales":
        SCALES.write_text(SCALES.read_text()[:100])
    elif name == "other type, digest fits":
        save_file({**tensors, weight: tensors[weight].astype(np.float32)}, FILE, facts)
    elif name == "no scales named, digest fits":
        save_file(tensors, FILE)
    if name.endswith("digest fits"):
        with_digest()
    if name == "other scales, digest is right":
        scale, zero_point = values["values"]["input"]
        with_digest(values={**values["values"], "input": [3 * scale, zero_point]})
    return weight


def test_files_that_do_not_belong_together_are_refused(hires, quantised):
    kept = {path: path.read_bytes() for path in (FILE, SCALES)}
    for name, text in (
        ("truncated", "not the file that the scales beside it"),
        ("other numbers", "not the file that the scales beside it"),
        ("a tensor less, digest fits", "1 missing; "),
        ("another network", "are of another network"),
        ("half the scales", "no whole JSON"),
        ("other type, digest fits", "other types: WEIGHT is float32 there and int8 here"),
        ("no scales named, digest fits", "does not say which scales belong to it"),
        ("other scales, digest is right", "are not those that it was written with"),
    ):
        for path, data in kept.items():
            path.write_bytes(data)
        weight = damage(name, np.int8)
        answer = hires(*INT8)
        assert (answer.code, text.replace("WEIGHT", weight) in answer.err) == (2, True), answer.err


def test_file_with_dynamic_scales_is_read_in_any_layout_as_it_is(hires, ranks):
    written = hires(*QUANTIZE, "quant.linear=dynamic", f"out={FILE}")
    assert written.code == 0, written.err
    assert "linear ones with a scale for each row" in written.out
    tensors = load_file(FILE)
    for layout in ("single", "sp", "pp"):
        answer = hires(*INT8, f"parallel={layout}", "--json")
        assert answer.code == 0, answer.err
        graph = Plan.from_dict(json.loads(answer.out)).graph
        stored = {n: fact.shape for n, fact in graph.params.items() if fact.recipe is None}
        assert {n: list(tensor.shape) for n, tensor in tensors.items()} == stored
    assert graph.by_name["fc"].kind == "q_dynamic_linear"
    assert tensors["fc:weight8"].dtype == np.int8
    # The calibration serves a file of the usual kind, too.
    assert hires(*QUANTIZE, "out=b.safetensors").code == 0
    assert len(ranks) == 1
    assert read_scales(SCALES).values == read_scales("b.json").values
