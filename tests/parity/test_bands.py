"""Networks in bands of rows compute what they compute of the whole image; in int8 bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.jobs import verify_each
from tests.helpers.parity_rows import Row, require_exact, rows
from tests.helpers.pool import POOL
from tests.parity.test_int8 import quantised

pytestmark = pytest.mark.dist

HEIGHTS = (3, 8)
"""Rows of a band."""
ODD = {"name": "custom", "target": "tests.helpers.custom_nets:Odd"}
RANDOM = {"name": "custom", "target": "tests.helpers.random_nets:composed"}
OTHERS = {
    "odd": {"model": ODD, "image": [47, 20], "data": {"classes": 5}},
    "odd, fp32": {"model": ODD, "image": [47, 20], "data": {"classes": 5}, "batch": 1},
    "resnet18, fp32": {
        "model": {"name": "resnet", "depth": 18, "classes": 4},
        "image": [96, 40],
        "batch": 1,
    },
    "shared weight, fp32": {
        "model": {
            "name": "custom",
            "target": "tests.helpers.custom_nets:SharedConvolution",
            "args": {"classes": 5},
        },
        "image": [47, 20],
        "data": {"classes": 5},
    },
    **{
        f"random {seed}": {"model": {**RANDOM, "args": {"seed": seed}}, "image": [31, 14]}
        for seed in range(6)
    },
}
"""Networks whose bands differ from each other, and those whose kernels write over a map in fp32."""


def of_networks(section: str = "") -> dict[str, Row]:
    """Returns a row for each network of the table and each height of bands, by name."""
    nets, found = {row.net: row for row in rows(section=section).values()}, {}
    for net, row in nets.items():
        keys = {key: value for key, value in row.keys.items() if key not in ("parallel", "memory")}
        for height in HEIGHTS:
            keys["parallel"] = {"band_rows": height}
            name = f"{net}, bands of {height}"
            found[name] = replace(row, name=name, keys=dict(keys), has="")
    return found


@pytest.mark.parametrize("part", range(4))
def test_bands_equal_the_whole_image(part: int, tmp_path: Path):
    some = [*of_networks().values()][part::4]
    layouts = [row.given(tmp_path, task={"name": "infer"}) for row in some]
    require_exact(POOL.run(verify_each, 1, layouts)[0], layouts)


PLAIN = rows()["single"]


def test_bands_of_other_networks_equal_the_whole_image(tmp_path: Path):
    layouts, errors = [], {}
    for (name, keys), height in itertools.product(OTHERS.items(), (2, 5, 7, 16)):
        precision = {"precision": {"name": "fp32"}} if name.endswith("fp32") else {}
        more = {"task": {"name": "infer"}, "parallel": {"band_rows": height}, **precision}
        row = replace(PLAIN, name=f"{name}, bands of {height}", keys=keys)
        layouts.append(row.given(tmp_path, **more))
        layouts[-1][2]["stores_on_disk"] = height == 5
    errors = POOL.run(verify_each, 1, layouts)[0]
    assert max(errors.values()) < 1e-5
    require_exact(
        {name: error for name, error in errors.items() if "fp32" not in name},
        [layout for layout in layouts if "fp32" not in layout[0]],
    )


def test_replicas_compute_images_of_their_own_in_bands(tmp_path: Path):
    net = {"name": "unet", "levels": 2, "width": 4, "classes": 4}
    keys = {"model": net, "image": [24, 12], "batch": 4}
    parallel = {"band_rows": 5, "replicas": 2, "microbatches": 2}
    row = replace(PLAIN, name="stream and dp", keys=keys)
    layouts = [row.given(tmp_path, task={"name": "infer"}, parallel=parallel)]
    require_exact(POOL.run(verify_each, 2, layouts)[0], layouts)


def test_int8_bands_have_the_bits_of_the_whole_image(tmp_path: Path):
    some = of_networks("int8")
    layouts = [quantised(row, tmp_path) for row in some.values()]
    errors = POOL.run(verify_each, 1, layouts)[0]
    in_float = {name: errors.pop(name) for name in some if name.startswith("transformer")}
    assert errors == dict.fromkeys(some.keys() - in_float, 0.0)
    assert 0 < max(in_float.values()) < 1e-6  # a mean of real numbers, whose order is another
