"""Are the published numbers those of the text, and do they stand in one place?"""

from __future__ import annotations

import pytest
import yaml

from hires.bench import thesis, thesis_memory
from hires.bench.contestants import bench_data
from hires.core.published import EACH, FIGURES, MEAN, MOST, TABLE_2_1, numbers_of


@pytest.mark.parametrize(
    ("figure", "how", "values"),
    [
        # Section 2.5.2.
        ("2.4", MEAN, {"fp16": 1.54, "bf16": 1.45, "int8": 6.5}),
        ("2.5", MEAN, {"fp16": 1.77, "bf16": 1.47, "int8": 4.55}),
        ("2.4", EACH, {"int8": 6.72}),
        ("2.5", EACH, {"int8": 6.29}),
        # Section 2.5.3.
        ("2.6", MEAN, {"fp16": 1.57, "bf16": 1.40}),
        ("2.7", MEAN, {"fp16": 1.57, "bf16": 1.40}),
        ("2.8", MOST, {"fp16": 1.9, "bf16": 1.6}),
        ("2.9", MOST, {"fp16": 1.55, "bf16": 1.65}),
        ("2.10", EACH, {"fp32": 87.0}),
    ],
)
def test_numbers_are_those_of_the_text(figure, how, values):
    assert {n.precision: n.value for n in numbers_of(figure) if n.how == how} == values


def test_speed_up_of_tiles_is_over_one_gpu():
    assert {n.tiles: n.value for n in numbers_of("2.11")} == {4: 1.8, 8: 2.0}
    assert {n.over for n in numbers_of("2.11")} == {"one GPU"}


def test_int8_of_table_2_1_gives_its_printed_reductions():
    assert TABLE_2_1["int8"][1] / TABLE_2_1["fp32"][1] == pytest.approx(6.22, abs=0.005)
    assert TABLE_2_1["fp32"][0] / TABLE_2_1["int8"][0] == pytest.approx(5.23, abs=0.015)


def test_rows_of_the_benchmark_state_no_number_of_a_figure_of_chapter_2():
    data = bench_data("thesis.yaml")
    rows = [*data["ratios"], *data["memory"], *data["memory_ratios"]]
    own = [row for row in rows if row["where"].startswith(("Fig. 2", "Table 2"))]
    assert len(own) > 10
    assert not [yaml.safe_dump(row) for row in own if "published" in row]


def test_benchmark_takes_them_from_the_one_home():
    made = [*thesis.RATIOS, *thesis_memory.FIGURES, *thesis_memory.RATIOS]
    of = {(row["where"].removeprefix("Fig. "), row.get("published")) for row in made}
    halves = [one for one in FIGURES if one.precision != "int8"]
    assert {(one.figure, one.value) for one in halves} <= of
    assert {("Table 2.1", TABLE_2_1[one][0]) for one in ("fp32", "fp16", "bf16")} <= of
