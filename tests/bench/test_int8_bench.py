"""Does ``hires bench int8`` compare every network in every layout, bit by bit?"""

from __future__ import annotations

import json

import pytest

from hires.bench.compared_step import config_from
from hires.bench.int8_bench import BENCHMARK, chosen
from hires.core.errors import ConfigError


def test_five_networks_at_even_and_uneven_sizes_on_two_to_four_tiles():
    rows = [*chosen("*")]
    assert len(rows) == 10
    assert len({row.name for row in rows}) == 5
    for row in rows:
        configs = [config_from(row.in_layout(keys)) for keys in row.layouts.values()]
        assert {(c.precision.name, c.task.name) for c in configs} == {("int8", "infer")}
        tiles = {grid[0] * grid[1] for c in configs for grid in c.parallel.grids}
        assert tiles >= {1, 2, 3, 4}
        assert {c.parallel.directions for c in configs} == {1, 2}
    for name in {row.name for row in rows}:
        sizes = [tuple(row.settings["image"]) for row in rows if row.name == name]
        assert sizes == [(96, 128), (75, 109)]


def test_patterns_choose_networks_of_8_bits():
    assert {row.name for row in chosen("ResNet*")} == {"ResNet-50", "ResNet-101"}
    with pytest.raises(ConfigError, match="--only 'none' matches none of ResNet-50"):
        next(chosen("none"))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("network", ["ResNet-50", "ResNet-101", "AmoebaNet-D*", "U-Net", "EDSR"])
def test_every_layout_has_the_bits_of_one_process(network, tmp_path):
    out = tmp_path / "int8"
    assert BENCHMARK.main(["--only", network, "--out", str(out)]) == 0
    rows = json.loads((out / "int8.json").read_text())["rows"]
    assert [len(row["layouts"]) for row in rows] == [8, 8]
    assert {answer["max_rel_err"] for row in rows for answer in row["layouts"].values()} == {0.0}
    assert min(row["least_db"] for row in rows) > 10  # no value is one number
    assert "16 of 16 layouts have the bits of one process" in (out / "README.md").read_text()
    for answer in rows[0]["layouts"].values():
        assert "quant.calibration=noise" in answer["again"]
        assert "quant.scales" not in answer["again"]


@pytest.mark.dist
@pytest.mark.slow
def test_network_whose_calibration_fails_is_a_row(tmp_path):
    out = tmp_path / "int8"
    assert BENCHMARK.main(["--only", "EDSR", "--timeout", "0.1", "--out", str(out)]) == 1
    text = (out / "README.md").read_text()
    assert "not compared: EDSR, EDSR" in text
    assert "the calibration of EDSR was not done after 0.1 s" in text
