"""Routes and tuning tables: what a text means, which rule decides, what a table gains."""

from __future__ import annotations

import json

import pytest

from hires.core.errors import ConfigError
from hires.plan.point_times import MeasuredSeconds, coarse
from hires.plan.routes import Route, parse_route
from hires.plan.table_rules import Case
from hires.plan.tuning_table import TuningTable


def test_text_and_route():
    for text, route in (
        ("gloo", Route("gloo")),
        ("gloo:direct", Route("gloo", "direct")),
        ("gloo:segmented:96KiB", Route("gloo", "segmented", 96 * 1024)),
    ):
        assert parse_route(text) == route
        assert str(route) == text
    for text, error in (
        ("glo", "did you mean gloo"),
        ("mpi:segmentd:4MiB", "did you mean segmented"),
        ("mpi:segmented", "write mpi:segmented:4MiB"),
        ("mpi:segmented:-1", "is no size"),
        ("mpi:direct:4MiB", "has no segments"),
    ):
        with pytest.raises(ConfigError, match=error):
            parse_route(text)


RULES = [
    {"operation": "send", "ranks_per_node": "all", "bytes": "..256KiB", "route": "shm"},
    {"operation": "all_reduce", "ranks": "2..4", "dtype": "float", "bytes": "..64KiB",
     "route": "shm"},
    {"operation": "all_reduce", "ranks": "2..4", "dtype": "float", "bytes": "64KiB..",
     "route": "mpi:segmented:4MiB", "note": "the larger ones"},
    {"operation": ["reduce", "broadcast"], "device": "cuda", "route": "default:direct"},
]  # fmt: skip
EMPTY = {"format": 1, "rules": [], "default": "gloo"}


def table(rules, default="gloo", base="gloo", **more):
    return TuningTable.from_dict({"format": 1, "rules": rules, "default": default, **more}, base)


def test_first_rule_that_is_possible_decides():
    for case, route in (
        (("send", 2, 2, "cpu", "bytes", 262144), Route("shm")),
        (("send", 2, 2, "cpu", "bytes", 262145), Route("gloo")),
        (("send", 2, 1, "cpu", "bytes", 8), Route("gloo")),
        (("all_reduce", 4, 1, "cuda", "float", 0), Route("shm")),
        (("all_reduce", 4, 1, "cuda", "float", 65536), Route("shm")),
        (("all_reduce", 4, 1, "cuda", "float", 65537), Route("mpi", "segmented", 2**22)),
        (("all_reduce", 5, 1, "cuda", "float", 65537), Route("gloo")),
        (("all_reduce", 4, 1, "cuda", "half", 8), Route("gloo")),
        (("broadcast", 9, 1, "cuda", "bytes", 8), Route("gloo", "direct")),
    ):
        assert table(RULES).route(*case) == route, case
    here = ("send", 2, 2, "cpu", "bytes", 8)
    assert table(RULES).route(*here, lambda route: route.backend != "shm") == Route("gloo")
    of_mpi = table(RULES, default="default", base="mpi")  # default: the backend of the config
    assert (of_mpi.default, of_mpi.rules[3].route) == (Route("mpi"), Route("mpi", "direct"))
    assert of_mpi.backends == ["mpi", "shm"]


def test_digest_follows_rules_and_default_alone(tmp_path):
    points = ["all_reduce 2 2 cpu float 65536 mpi:segmented:4MiB 0.00031"]
    written = table(RULES, points=points, made={"machine": "m", "noise": 0.02})
    written.write(tmp_path / "table.json")
    again = TuningTable.read(tmp_path / "table.json")
    assert again == written
    assert again.points[0].seconds == 0.00031
    text = (tmp_path / "table.json").read_text()
    assert all(any(json.dumps(rule) in line for line in text.splitlines()) for rule in RULES[:3])
    assert again.digest == table(RULES).digest
    assert again.digest != table(RULES, default="mpi").digest
    assert again.digest != table(RULES[::-1]).digest


def test_what_cannot_be_meant_is_named(tmp_path):
    for rule, error in (
        ({"operation": "allreduce", "route": "gloo"}, "unknown operation 'allreduce'; did you"),
        ({"bytes": "4KB..2KB", "route": "gloo"}, "holds nothing; write 4KiB..1MiB"),
        ({"ranks": 2.5, "route": "gloo"}, "no whole number"),
        ({"operation": ["reduce", "gather"], "bytes": "4KiB..", "route": "gloo"}, "leave bytes"),
        ({"byte": 4, "route": "gloo"}, "unknown key 'byte'; did you mean bytes"),
        ({"bytes": 4}, "it has no route"),
        ("gloo", "is no rule"),
    ):
        with pytest.raises(ConfigError, match=f"rule 2: .*{error}"):
            table([RULES[0], rule])
    for values, error in (
        ({"format": 2}, "format 2; this hires reads 1"),
        ({"rules": "gloo"}, "are no list"),
        ({"default": None}, "default: .* no text"),
        ({"rule": []}, "unknown key 'rule'"),
        ({"points": ["send 2 2 cpu bytes 8 gloo nan"]}, "point 1: .*positive"),
        ({"points": ["send 2 2 cpu bytes 8 gloo"]}, "is no point"),
        ({"points": ["send 2 2 cpu bytes 8 glo 1"]}, "unknown backend"),
        ({"points": ["send 2 2 cpu bytes 8 null 1"]}, "unknown backend"),
    ):
        with pytest.raises(ConfigError, match=error):
            TuningTable.from_dict(EMPTY | values)
    path = tmp_path / "t.json"
    with pytest.raises(ConfigError, match="hires tune comm"):
        TuningTable.read(path)
    for text, error in (
        ('{"format": 1,\n "rules": [}', "line 2"),
        (json.dumps(EMPTY | {"rules": [{"bytes": "x", "route": "gloo"}]}), r"t\.json: rule 1: byt"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=error):
            TuningTable.read(path)


SMALL, LARGE = 1024, 2**20
MEASURED = table(
    [
        {"operation": "all_reduce", "bytes": "..64KiB", "route": "mpi"},
        {"operation": "all_reduce", "bytes": "64KiB..", "route": "shm"},
    ],
    points=[
        f"all_reduce 2 2 cpu float {SMALL} gloo 300e-6",
        f"all_reduce 2 2 cpu float {SMALL} mpi 3e-6",
        f"all_reduce 2 2 cpu float {LARGE} gloo 2e-3",
        f"all_reduce 2 2 cpu float {LARGE} mpi 4e-3",
        f"all_reduce 2 2 cpu float {LARGE} mpi:segmented:256KiB 1e-3",
        f"all_reduce 2 2 cpu float {LARGE} shm 0.5e-3",
    ],
)


def test_coarse_takes_the_backend_with_the_least_product_of_slowdowns():
    # mpi: 1 x 8; gloo: 100 x 4; shm was not measured at both sizes.
    [rule] = coarse(MEASURED).rules
    assert (rule.route, rule.num_bytes) == (Route("mpi"), (0, float("inf")))


def test_seconds_between_and_beyond_points():
    seconds, mpi = MeasuredSeconds(MEASURED).seconds, Route("mpi")
    case = Case("all_reduce", 2, 2, "cpu", "float", LARGE)
    assert seconds(case, mpi) == 4e-3
    between = seconds(case._replace(num_bytes=32768), mpi)
    assert between == pytest.approx((3e-6 * 4e-3) ** 0.5)  # halfway between the logarithms
    assert seconds(case._replace(num_bytes=4 * LARGE), mpi) == pytest.approx(16e-3)
    assert seconds(case._replace(num_bytes=1), mpi) == 3e-6
    assert seconds(case._replace(ranks=4, ranks_per_node=4), mpi) == 4e-3
    assert seconds(case, parse_route("mpi:direct")) is None
    assert seconds(case._replace(device="cuda"), mpi) is None
