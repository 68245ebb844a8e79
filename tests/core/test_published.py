"""Are the published numbers those of the text, and do they stand in one place?"""

from __future__ import annotations

import pytest

from hires.core.published import EACH, MEAN, MOST, TABLE_2_1, numbers_of


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
