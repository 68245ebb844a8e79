"""Are the peaks of a layout measured in processes of its own, and shown rank by rank?"""

from __future__ import annotations

import pytest

from hires.bench.contestants import LayoutsOptions, line_up
from hires.bench.layouts_bench import peaks
from hires.bench.layouts_table import memory_cells
from hires.core.units import MIB

ENTRY = {"measured_bytes": 100 * MIB, "predicted_bytes": 97 * MIB}


def test_every_rank_has_a_line_and_the_row_is_named_once():
    rows = [
        {"name": "single", "memory": [ENTRY]},
        {"name": "module", "memory": None},
        {"name": "tiles", "memory": [ENTRY, ENTRY]},
    ]
    assert [[*cells.values()] for cells in memory_cells(rows)] == [
        ["single", "0", "100.0", "97.0", "-3.0"],
        ["tiles", "0", "100.0", "97.0", "-3.0"],
        ["", "1", "100.0", "97.0", "-3.0"],
    ]


@pytest.mark.slow
@pytest.mark.dist
def test_tiles_are_measured_and_others_are_not():
    rows = line_up(
        LayoutsOptions(device="cpu", model="resnet18", image=[64, 64], only=("sp",)), "train"
    )
    tiles = next(row for row in rows if row.name == "tiles 2x1")
    module = next(row for row in rows if row.kind == "module")
    assert peaks(module, 60) is None
    found = peaks(tiles, 120)
    assert found is not None
    assert len(found) == 2
    for entry in found:  # 11 million parameters with gradients and momenta
        assert entry["measured_bytes"] > 3 * 4 * 11e6
        assert entry["predicted_bytes"] == pytest.approx(entry["measured_bytes"], rel=0.15)
