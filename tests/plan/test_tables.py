"""Routes and tuning tables: what a text means, which rule decides, what a table gains."""

from __future__ import annotations

import pytest

from hires.core.errors import ConfigError
from hires.plan.routes import Route, parse_route
from hires.plan.tuning_table import Case, MeasuredSeconds, TuningTable, coarse


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
    {"operations": ["send"], "same_node": True, "max_bytes": 262144, "route": "shm"},
    {"operations": ["all_reduce"], "min_ranks": 2, "max_ranks": 4, "dtypes": ["float"],
     "max_bytes": 65536, "route": "shm"},
    {"operations": ["all_reduce"], "min_ranks": 2, "max_ranks": 4, "dtypes": ["float"],
     "min_bytes": 65536, "route": "mpi:segmented:4MiB", "note": "the larger ones"},
    {"operations": ["reduce", "broadcast"], "devices": ["cuda"], "route": "default:direct"},
]  # fmt: skip
EMPTY = {"format": 2, "rules": [], "default": "gloo"}


def table(rules, default="gloo", base="gloo", **more):
    return TuningTable.from_dict({"format": 2, "rules": rules, "default": default, **more}, base)


def test_first_rule_that_is_possible_decides():
    for case, route in (
        (("send", 2, True, "cpu", "bytes", 262144), Route("shm")),
        (("send", 2, True, "cpu", "bytes", 262145), Route("gloo")),
        (("send", 2, False, "cpu", "bytes", 8), Route("gloo")),
        (("all_reduce", 4, False, "cuda", "float", 0), Route("shm")),
        (("all_reduce", 4, False, "cuda", "float", 65536), Route("shm")),
        (("all_reduce", 4, False, "cuda", "float", 65537), Route("mpi", "segmented", 2**22)),
        (("all_reduce", 5, False, "cuda", "float", 65537), Route("gloo")),
        (("all_reduce", 4, False, "cuda", "half", 8), Route("gloo")),
        (("broadcast", 9, False, "cuda", "bytes", 8), Route("gloo", "direct")),
    ):
        assert table(RULES).route(Case(*case)) == route, case
    of_mpi = table(RULES, default="default", base="mpi")  # default: the backend of the config
    assert (of_mpi.default, of_mpi.rules[3].route) == ("mpi", "mpi:direct")
    assert of_mpi.backends == ["mpi", "shm"]
    # Messages one by one on streams, and algorithms that an operation lacks, are passed over.
    broadcast, barrier = (Case(name, 9, False, "cuda", "bytes", 8) for name in RULED)
    assert table(RULES, base="nccl").route(broadcast) == Route("gloo")
    assert table([{"route": "mpi:direct"}]).route(barrier) == Route("gloo")


RULED = ("broadcast", "barrier")


def test_digest_follows_rules_and_default_alone(tmp_path):
    points = [[["all_reduce", 2, True, "cpu", "float", 65536], "mpi:segmented:4MiB", 0.00031]]
    written = table(RULES, points=points, made={"machine": "m", "noise": 0.02})
    written.write(tmp_path / "table.json")
    again = TuningTable.read(tmp_path / "table.json")
    assert again == written
    assert again.points[0].seconds == 0.00031
    assert again.digest == table(RULES).digest
    assert again.digest != table(RULES, default="mpi").digest
    assert again.digest != table(RULES[::-1]).digest


def test_what_cannot_be_meant_is_named(tmp_path):
    for rule, error in (
        ({"operations": ["allreduce"], "route": "gloo"}, "unknown operation 'allreduce'; did you"),
        ({"max_ranks": 2.5, "route": "gloo"}, "max_ranks=2.5 must be a whole number"),
        ({"operations": ["reduce", "gather"], "min_bytes": 4, "route": "gloo"}, "leave min_"),
        ({"bytes": 4, "route": "gloo"}, "; choose one of devices"),
        ({"max_bytes": 4}, "missing .*'route'"),
        ({"operations": ["send"], "route": "gloo:direct"}, "direct does not carry out send"),
        ("gloo", "must hold keys"),
    ):
        with pytest.raises(ConfigError, match=rf"rules\[1\].*{error}"):
            table([RULES[0], rule])
    point = ["send", 2, True, "cpu", "bytes", 8]
    for values, error in (
        ({"format": 1}, "format 1; this hires reads 2"),
        ({"rules": "gloo"}, "rules='gloo' must be"),
        ({"default": None}, "default=None must be text"),
        ({"rule": []}, "unknown key rule; choose one of default"),
        ({"points": [[point, "gloo", float("nan")]]}, "points.0.: .*positive"),
        ({"points": [[point, "gloo"]]}, "points.0. is incomplete"),
        ({"points": [[point, "glo", 1]]}, "unknown backend"),
        ({"points": [[point, "null", 1]]}, "unknown backend"),
    ):
        with pytest.raises(ConfigError, match=error):
            TuningTable.from_dict(EMPTY | values)
    path = tmp_path / "t.json"
    with pytest.raises(ConfigError, match="hires tune comm"):
        TuningTable.read(path)
    path.write_text('{"format": 2,\n "rules": [}')
    with pytest.raises(ConfigError, match="line 2"):
        TuningTable.read(path)


SMALL, LARGE = 1024, 2**20


def sums(num_bytes: int) -> list[object]:
    return ["all_reduce", 2, True, "cpu", "float", num_bytes]


MEASURED = table(
    [
        {"operations": ["all_reduce"], "max_bytes": 65536, "route": "mpi"},
        {"operations": ["all_reduce"], "min_bytes": 65536, "route": "shm"},
    ],
    points=[
        [sums(SMALL), "gloo", 300e-6],
        [sums(SMALL), "mpi", 3e-6],
        [sums(LARGE), "gloo", 2e-3],
        [sums(LARGE), "mpi", 4e-3],
        [sums(LARGE), "mpi:segmented:256KiB", 1e-3],
        [sums(LARGE), "shm", 0.5e-3],
    ],
)


def test_coarse_takes_the_backend_with_the_least_product_of_slowdowns():
    # mpi: 1 x 8; gloo: 100 x 4; shm was not measured at both sizes.
    [rule] = coarse(MEASURED).rules
    assert (rule.route, rule.min_bytes, rule.max_bytes) == ("mpi", 0, None)


def test_seconds_between_and_beyond_points():
    seconds, mpi = MeasuredSeconds(MEASURED).seconds, Route("mpi")
    case = Case("all_reduce", 2, True, "cpu", "float", LARGE)
    assert seconds(case, mpi) == 4e-3
    for power, share in ((11, 0.1), (15, 0.5), (18, 0.8)):  # of the way between the logarithms
        between = seconds(case._replace(num_bytes=2**power), mpi)
        assert between == pytest.approx(3e-6 ** (1 - share) * 4e-3**share)
    assert seconds(case._replace(num_bytes=4 * LARGE), mpi) == pytest.approx(16e-3)
    assert seconds(case._replace(num_bytes=1), mpi) == 3e-6
    assert seconds(case._replace(ranks=4), mpi) == 4e-3
    assert seconds(case, parse_route("mpi:direct")) is None
    assert seconds(case._replace(device="cuda"), mpi) is None


def test_seconds_are_those_of_the_nearest_number_of_ranks():
    case = Case("all_reduce", 2, True, "cpu", "float", 1024)
    points = [[[*case._replace(ranks=ranks)], "gloo", ranks * 1e-3] for ranks in (2, 8, 64)]
    seconds = MeasuredSeconds(TuningTable.from_dict({**EMPTY, "points": points})).seconds
    for ranks, nearest in ((3, 2), (6, 8), (16, 8), (48, 64), (256, 64)):
        assert seconds(case._replace(ranks=ranks), Route("gloo")) == nearest * 1e-3
