"""Is the arithmetic of predicted beside measured layouts right?"""

from __future__ import annotations

import pytest

from hires.bench.choice_statistics import at_one_pace, kendall_tau, summary


@pytest.mark.parametrize(
    ("pairs", "tau"),
    [
        ([(1, 10), (2, 20), (3, 30)], 1.0),
        ([(1, 30), (2, 20), (3, 10)], -1.0),
        ([(1, 10), (2, 30), (3, 20)], 1 / 3),
        ([(1, 10), (1, 20)], 0.0),
        ([(1, 10)], 1.0),
    ],
)
def test_kendalls_tau(pairs, tau):
    assert kendall_tau(pairs) == pytest.approx(tau)


def test_pace_of_each_round_is_taken_out_of_the_steps():
    pace_s = [0.1, 0.2, 0.1, 0.4]
    steps_s = [[1.0, 2.0, 1.0, 4.0], [3.0, 6.0, 3.0, 12.0]]
    assert at_one_pace(steps_s, pace_s, 0.1) == pytest.approx([1.0, 3.0])
    pace_s[1] = 7.0  # one disturbed round does not matter
    steps_s[1][2] = 99.0
    assert at_one_pace(steps_s, pace_s, 0.1) == pytest.approx([1.0, 3.0])


def test_case_of_one_layout_counts_for_errors_only():
    layout = {"predicted_s": 1.1, "generic_s": 2.0, "measured_s": 1.0, "at_pace_s": 1.0}
    layout["halves_s"] = [1.0, 1.0]
    single = {"layouts": [layout], "tau": 1.0, "tau_of_halves": 1.0, "behind": 0.0, "search_s": 1.0}
    two = {**single, "layouts": [layout, layout], "tau": 0.0, "behind": 0.5}
    both = summary([single, two])
    assert (both["cases"], both["right"], both["mean_tau"]) == (1, 0, 0.0)
    assert both["mean_error"] == pytest.approx(0.1)
    assert summary([single])["cases"] == 0
