"""What counts as equal to one process."""

from __future__ import annotations

from hires.engine.verify import KINDS, summary

GOOD = {"output": 1e-14, "loss": 0.0, "gradients": 1e-13, "parameters": 1e-15}
NAMES = ["output/0", "loss/", "gradients/a.weight", "parameters/a.weight"]


def test_largest_error_of_all_ranks_decides():
    lines = [
        {"rank": 0, "errors": GOOD, "names": NAMES},
        {"rank": 1, "errors": {**GOOD, "gradients": 2e-10}, "names": NAMES},
    ]
    answer = summary(lines, NAMES)
    assert answer["ok"] is False
    assert answer["max_rel_err"] == 2e-10
    assert list(answer["errors"]) == list(KINDS)


def test_kind_that_neither_side_has_is_not_said_to_be_equal():
    answer = summary([{"rank": 0, "errors": GOOD, "names": NAMES}], NAMES)
    assert answer["ok"] is True
    assert answer["errors"]["running_stats"] is None


def test_tensor_that_no_rank_compared_is_wrong():
    # A gradient owned by nobody went unnoticed, since only what ranks held was looked at.
    answer = summary([{"rank": 0, "errors": GOOD, "names": NAMES}], [*NAMES, "gradients/b.weight"])
    assert answer["ok"] is False
    assert answer["errors"]["gradients"] == float("inf")
