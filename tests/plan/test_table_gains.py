"""A measured table: one backend an operation, what mixing gains, seconds between the points."""

import pytest

from hires.plan.routes import Route, parse_route
from hires.plan.table_gains import MeasuredSeconds, coarse, gain_of, verdict
from hires.plan.table_rules import Case
from hires.plan.tuning_table import TuningTable

SMALL, LARGE = 1024, 2**20
POINTS = [
    f"all_reduce 2 2 cpu float {SMALL} gloo 300e-6",
    f"all_reduce 2 2 cpu float {SMALL} mpi 3e-6",
    f"all_reduce 2 2 cpu float {LARGE} gloo 2e-3",
    f"all_reduce 2 2 cpu float {LARGE} mpi 4e-3",
    f"all_reduce 2 2 cpu float {LARGE} mpi:segmented:256KiB 1e-3",
    f"all_reduce 2 2 cpu float {LARGE} cma 0.5e-3",
]
RULES = [
    {"operation": "all_reduce", "bytes": "..64KiB", "route": "mpi"},
    {"operation": "all_reduce", "bytes": "64KiB..", "route": "cma"},
]


def table(rules=RULES, points=POINTS, default="gloo"):
    values = {"format": 1, "rules": rules, "default": default, "points": points}
    return TuningTable.from_dict(values)


def test_coarse_takes_the_backend_with_the_least_product_of_slowdowns():
    # mpi: 1 x 8; gloo: 100 x 4; cma was not measured at both sizes.
    [rule] = coarse(table()).rules
    assert rule.route == Route("mpi")
    assert rule.num_bytes == (0, float("inf"))


def test_coarse_without_points_counts_powers_of_two():
    assert coarse(table(points=[])).rules[0].route == Route("mpi")  # 14 octaves each, by name
    rules = [{"operation": "send", "bytes": "4..8", "route": "mpi:message"}]
    assert coarse(table(rules, [])).rules[0].route == Route("gloo", "message")


def test_gain_is_over_the_best_single_backend():
    gain = gain_of(table())
    assert gain is not None
    assert gain.backend == "mpi"
    assert gain.seconds == pytest.approx(0.503e-3)
    assert gain.alone_s == pytest.approx(1.003e-3)
    assert verdict(table()) == "mixing gains 49.9% over mpi alone, over all measured cases"


def test_one_backend_everywhere_gains_nothing():
    text = "mixing gains nothing here: gloo wins everywhere"
    assert verdict(table([{"operation": "send", "route": "gloo"}])) == text
    assert verdict(table([{"route": "mpi"}], POINTS)).startswith("mixing gains nothing here: mpi")


def test_unmeasured_table_has_no_gain():
    assert gain_of(table(points=[])) is None
    assert verdict(table(points=[])) == ""


def test_seconds_between_and_beyond_points():
    seconds = MeasuredSeconds(table())
    case = Case("all_reduce", 2, 2, "cpu", "float", LARGE)
    mpi = Route("mpi")
    assert seconds.seconds(case, mpi) == 4e-3
    between = seconds.seconds(case._replace(num_bytes=32768), mpi)
    assert between == pytest.approx((3e-6 * 4e-3) ** 0.5)  # halfway between the logarithms
    assert seconds.seconds(case._replace(num_bytes=4 * LARGE), mpi) == pytest.approx(16e-3)
    assert seconds.seconds(case._replace(num_bytes=1), mpi) == 3e-6
    assert seconds.seconds(case._replace(ranks=4, ranks_per_node=4), mpi) == 4e-3
    assert seconds.seconds(case, parse_route("mpi:two_step")) is None
    assert seconds.seconds(case._replace(device="cuda"), mpi) is None
