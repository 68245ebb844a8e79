"""Routes and tuning tables: what a text means, which rule decides, what a table gains."""

from __future__ import annotations

import json

import pytest

from hires.core.errors import ConfigError
from hires.plan.routes import Route, parse_route
from hires.plan.table_gains import MeasuredSeconds, coarse
from hires.plan.table_rules import Case
from hires.plan.tuning_table import TuningTable


def test_text_and_route():
    for text, route in (
        ("gloo", Route("gloo")),
        ("shm:mailbox", Route("shm", "mailbox")),
        ("gloo:segmented:96KiB", Route("gloo", "segmented", 96 * 1024)),
    ):
        assert parse_route(text) == route
        assert str(route) == text
    for text, error in (
        ("glo", "unknown backend 'glo'; did you mean gloo"),
        ("mpi:segmentd:4MiB", "unknown algorithm 'segmentd'; did you mean segmented"),
        ("mpi:segmented", "no segment size; write mpi:segmented:4MiB"),
        ("mpi:segmented:-1", "is no size"),
        ("mpi:mailbox:4MiB", "mailbox has no segments"),
    ):
        with pytest.raises(ConfigError, match=error):
            parse_route(text)


RULES = [
    {"operation": "send", "ranks_per_node": "all", "bytes": "..256KiB", "route": "shm:mailbox"},
    {"operation": "all_reduce", "ranks": "2..4", "dtype": "float", "bytes": "..64KiB",
     "route": "shm"},
    {"operation": "all_reduce", "ranks": "2..4", "dtype": "float", "bytes": "64KiB..",
     "route": "mpi:segmented:4MiB", "note": "the larger ones"},
    {"operation": ["reduce", "broadcast"], "device": "cuda", "route": "default:direct"},
]  # fmt: skip


def table(rules, default="gloo", base="gloo", **more):
    return TuningTable.from_dict({"format": 1, "rules": rules, "default": default, **more}, base)


CASES = (
    (("send", 2, 2, "cpu", "bytes", 262144), Route("shm", "mailbox")),
    (("send", 2, 2, "cpu", "bytes", 262145), Route("gloo")),
    (("send", 2, 1, "cpu", "bytes", 8), Route("gloo")),
    (("all_reduce", 4, 1, "cuda", "float", 0), Route("shm")),
    (("all_reduce", 4, 1, "cuda", "float", 65536), Route("shm")),
    (("all_reduce", 4, 1, "cuda", "float", 65537), Route("mpi", "segmented", 2**22)),
    (("all_reduce", 5, 1, "cuda", "float", 65537), Route("gloo")),
    (("all_reduce", 4, 1, "cuda", "half", 8), Route("gloo")),
    (("broadcast", 9, 1, "cuda", "bytes", 8), Route("gloo", "direct")),
)


def test_first_rule_that_is_possible_decides():
    for case, route in CASES:
        assert table(RULES).route(*case) == route, case
    here = ("send", 2, 2, "cpu", "bytes", 8)
    assert table(RULES).route(*here, lambda route: route.backend != "shm") == Route("gloo")


def test_default_means_the_backend_of_the_config():
    made = table(RULES, default="default", base="mpi")
    assert made.default == Route("mpi")
    assert made.rules[3].route == Route("mpi", "direct")
    assert made.backends == ["mpi", "shm"]


def test_written_table_is_read_back(tmp_path):
    points = ["all_reduce 2 2 cpu float 65536 mpi:segmented:4MiB 0.00031"]
    made = table(RULES, points=points, made={"machine": "m", "noise": 0.02})
    made.write(tmp_path / "table.json")
    again = TuningTable.read(tmp_path / "table.json")
    assert again == made
    assert again.digest == made.digest
    assert again.points[0].seconds == 0.00031
    text = (tmp_path / "table.json").read_text()
    assert all(any(json.dumps(rule) in line for line in text.splitlines()) for rule in RULES[:3])


def test_digest_follows_rules_and_default_alone():
    made = table(RULES)
    assert made.digest == table(RULES, points=["send 2 2 cpu bytes 8 gloo 1e-5"]).digest
    assert made.digest != table(RULES, default="mpi").digest
    assert made.digest != table(RULES[::-1]).digest


WRONG_RULES = (
    ({"operation": "allreduce", "route": "gloo"}, "unknown operation 'allreduce'; did you"),
    ({"bytes": "4KB..2KB", "route": "gloo"}, "holds nothing; write 4KiB..1MiB"),
    ({"ranks": 2.5, "route": "gloo"}, "no whole number"),
    (
        {"operation": ["reduce", "gather"], "bytes": "4KiB..", "route": "gloo"},
        r"bytes '4KiB\.\.': the ranks of gather may have a size each, .* leave bytes out",
    ),
    ({"byte": 4, "route": "gloo"}, "unknown key 'byte'; did you mean bytes"),
    ({"bytes": 4}, "it has no route"),
    ("gloo", "is no rule"),
)
MALFORMED = (
    ({"format": 2}, "format 2; this hires reads 1"),
    ({"rules": "gloo"}, "are no list"),
    ({"default": None}, "default: .* no text"),
    ({"rule": []}, "unknown key 'rule'"),
    ({"points": ["send 2 2 cpu bytes 8 gloo nan"]}, "point 1: .*positive"),
    ({"points": ["send 2 2 cpu bytes 8 gloo"]}, "is no point"),
    ({"points": ["send 2 2 cpu bytes 8 glo 1"]}, "unknown backend"),
)


def test_what_cannot_be_meant_is_named(tmp_path):
    for rule, error in WRONG_RULES:
        with pytest.raises(ConfigError, match=f"rule 2: .*{error}"):
            table([RULES[0], rule])
    for values, error in MALFORMED:
        with pytest.raises(ConfigError, match=error):
            TuningTable.from_dict({"format": 1, "rules": [], "default": "gloo"} | values)
    path = tmp_path / "t.json"
    with pytest.raises(ConfigError, match="hires tune comm"):
        TuningTable.read(path)
    path.write_text('{"format": 1,\n "rules": [}')
    with pytest.raises(ConfigError, match="line 2"):
        TuningTable.read(path)
    path.write_text('{"format": 1, "rules": [{"bytes": "x", "route": "gloo"}], "default": "gloo"}')
    with pytest.raises(ConfigError, match=r"t\.json: rule 1: bytes 'x'"):
        TuningTable.read(path)


@pytest.mark.parametrize(
    ("boxes", "error"),
    [
        (["..1MiB", "4KiB..8KiB"], "rule 2: it never decides"),
        (["..1MiB", "2MiB..", "512KiB..4MiB", "1KiB..3MiB"], "rule 4: it never decides"),
        (["..64KiB", "128KiB.."], r"rule 1: no rule holds the bytes 65537\.\.131071 behind it"),
    ],
)
def test_overlaps_and_gaps(boxes, error):
    with pytest.raises(ConfigError, match=error):
        table([{"operation": "send", "bytes": box, "route": "gloo"} for box in boxes])


SMALL, LARGE = 1024, 2**20


POINTS = [
    f"all_reduce 2 2 cpu float {SMALL} gloo 300e-6",
    f"all_reduce 2 2 cpu float {SMALL} mpi 3e-6",
    f"all_reduce 2 2 cpu float {LARGE} gloo 2e-3",
    f"all_reduce 2 2 cpu float {LARGE} mpi 4e-3",
    f"all_reduce 2 2 cpu float {LARGE} mpi:segmented:256KiB 1e-3",
    f"all_reduce 2 2 cpu float {LARGE} shm 0.5e-3",
]


def test_coarse_takes_the_backend_with_the_least_product_of_slowdowns():
    # mpi: 1 x 8; gloo: 100 x 4; shm was not measured at both sizes.
    [rule] = coarse(measured()).rules
    assert rule.route == Route("mpi")
    assert rule.num_bytes == (0, float("inf"))


def test_seconds_between_and_beyond_points():
    seconds = MeasuredSeconds(measured())
    case = Case("all_reduce", 2, 2, "cpu", "float", LARGE)
    mpi = Route("mpi")
    assert seconds.seconds(case, mpi) == 4e-3
    between = seconds.seconds(case._replace(num_bytes=32768), mpi)
    assert between == pytest.approx((3e-6 * 4e-3) ** 0.5)  # halfway between the logarithms
    assert seconds.seconds(case._replace(num_bytes=4 * LARGE), mpi) == pytest.approx(16e-3)
    assert seconds.seconds(case._replace(num_bytes=1), mpi) == 3e-6
    assert seconds.seconds(case._replace(ranks=4, ranks_per_node=4), mpi) == 4e-3
    assert seconds.seconds(case, parse_route("mpi:direct")) is None
    assert seconds.seconds(case._replace(device="cuda"), mpi) is None


def measured(rules=None, points=POINTS):
    rules = rules or [
        {"operation": "all_reduce", "bytes": "..64KiB", "route": "mpi"},
        {"operation": "all_reduce", "bytes": "64KiB..", "route": "shm"},
    ]
    return table(rules, points=points)
