"""Is the XML what a CI server reads, whatever names there are?"""

from __future__ import annotations

from xml.etree import ElementTree

from hires.report.compare.comparison import Comparison, Difference, junit_text
from hires.report.compare.metrics import METRICS
from hires.report.compare.verdicts import PointVerdict, Settings, parse_tolerance

HOSTILE = "]]></x><script>&\"'\x00\x1b\ud800\ufffe\n\u202e"
METRIC = METRICS["throughput"]


def made(*results, names=("a", "b")):
    settings = Settings(parse_tolerance("5%"))
    return Comparison(names, settings, list(results), config=[Difference("key", "1", HOSTILE)])


def test_worse_fails_unknown_is_skipped_and_the_rest_passes():
    tolerance = parse_tolerance("5%")
    worse = PointVerdict("p", METRIC, "worse", "slower", "3 and 3 repeats", 8.0, 7.2, (3, 3), 0.9)
    same = PointVerdict(
        "q", METRIC, "same", "no difference", "x", 8, 8, (3, 3), 1, (0.99, 1.01), tolerance
    )
    unknown = PointVerdict("r", METRIC, "unknown", "unknown", "A: it recorded none")
    [suite] = ElementTree.fromstring(junit_text(made(worse, same, unknown)).encode())
    counts = [suite.get(key) for key in ("tests", "failures", "skipped", "errors")]
    assert counts == ["3", "1", "1", "0"]
    cases = suite.findall("testcase")
    assert [case.get("classname") for case in cases] == ["hires.throughput"] * 3
    assert [case.get("name") for case in cases] == ["p", "q", "r"]
    assert [case[0].tag for case in cases] == ["failure", "system-out", "skipped"]
    assert "slower: 8 -> 7.2 img/s, -10.0 %" in cases[0][0].get("message")
    assert "[-1.0 %, +1.0 %], tolerance -5%,+5%" in cases[1][0].text


def test_names_of_anybody_stay_names():
    hostile = PointVerdict(HOSTILE, METRIC, "worse", HOSTILE, HOSTILE)
    text = junit_text(made(hostile, names=(HOSTILE, HOSTILE)))
    root = ElementTree.fromstring(text.encode())
    assert {element.tag for element in root.iter()} == {
        "testsuites", "testsuite", "properties", "property", "testcase", "failure",
    }  # fmt: skip
    assert "<script>&\"'" in root.find(".//testcase").get("name")
    assert not set(text) & set("\x00\x1b\ufffe\u202e")
