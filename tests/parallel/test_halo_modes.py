"""However tiles get their halos, they compute what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.layouts import verified

pytestmark = pytest.mark.dist

ZOO = {
    "image": [37, 41],
    "model": {"name": "custom", "target": "tests.helpers.custom_nets:zoo"},
    "data": {"classes": 5, "length": 16},
}
BASIC = {"image": [75, 61], "model": {"name": "resnet", "depth": 18, "classes": 4}}


CELLS = {**ZOO, "model": {"name": "custom", "target": "tests.helpers.custom_nets:cells"}}


def check(folder: Path, tiles: list[int], halo: dict[str, Any], **keys: Any) -> None:
    answer = verified(folder, **keys, parallel={"tiles": tiles, "halo": halo})
    assert answer["ok"], answer
    assert answer["max_rel_err"] < 1e-10


@pytest.mark.parametrize("net", [ZOO, BASIC], ids=["zoo", "resnet"])
@pytest.mark.parametrize("tiles", [[2, 1], [1, 3], [2, 2]])
def test_interior_while_the_halo_travels(net: dict[str, Any], tiles: list[int], tmp_path: Path):
    check(tmp_path, tiles, {"overlap": "on"}, **net)


def test_interior_of_tiles_with_eight_neighbours(tmp_path: Path):
    check(tmp_path, [3, 3], {"overlap": "on"}, **{**BASIC, "image": [61, 67]})


def test_halo_first(tmp_path: Path):
    check(tmp_path, [2, 2], {"overlap": "off"}, **ZOO)


@pytest.mark.parametrize(("tiles", "overlap"), [([3, 1], "on"), ([2, 2], "auto")])
def test_branches_that_share_their_halo(tiles: list[int], overlap: str, tmp_path: Path):
    check(tmp_path, tiles, {"overlap": overlap}, **CELLS)
