"""Writes a comparison as JUnit's XML, a test case for each point and metric, for CI servers.

The standard library's ElementTree escapes all that must be; junitparser would add a dependency
and save no line.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from hires.core.store import reading
from hires.core.store.files import write_atomically
from hires.report.compare.comparison import Comparison
from hires.report.compare.verdicts import UNDECIDED, UNKNOWN, WORSE, PointVerdict

OPTION = "--junit FILE"
_SKIPPED = (UNKNOWN, UNDECIDED)
_MAX_TEXT = 100_000
"""Characters; no text of a comparison is as long."""


def write_junit(path: Path, comparison: Comparison) -> None:
    """Writes a comparison.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_atomically(path, junit_text(comparison), option=OPTION)


def junit_text(comparison: Comparison) -> str:
    """Returns a comparison as XML: a worse point is a failure, an unknown one is skipped."""
    verdicts = [*comparison.results, *comparison.overall]
    counts = {
        "name": _plain(f"hires compare {comparison.names[0]} {comparison.names[1]}"),
        "tests": str(len(verdicts)),
        "failures": str(sum(verdict.status == WORSE for verdict in verdicts)),
        "skipped": str(sum(verdict.status in _SKIPPED for verdict in verdicts)),
        "errors": "0",
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", counts)
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(comparison):
        ElementTree.SubElement(properties, "property", name=_plain(name), value=_plain(value))
    for verdict in verdicts:
        names = {"classname": f"hires.{verdict.metric.name}", "name": _plain(verdict.point)}
        case = ElementTree.SubElement(suite, "testcase", names)
        message = _plain(sentence(verdict))
        if verdict.status == WORSE:
            failure = ElementTree.SubElement(case, "failure", message=message, type="regression")
            failure.text = message
        elif verdict.status in _SKIPPED:
            ElementTree.SubElement(case, "skipped", message=message)
        else:
            ElementTree.SubElement(case, "system-out").text = message
    ElementTree.indent(root)
    xml = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{xml}\n'


def sentence(verdict: PointVerdict) -> str:
    """Returns a verdict in one sentence."""
    if verdict.ratio is None:
        return f"{verdict.verdict}: {verdict.why}"
    unit, shown = verdict.metric.unit, verdict.metric.shown
    change = f"{100 * (verdict.ratio - 1):+.1f} %"
    if verdict.a is not None and verdict.b is not None:
        change = f"{shown(verdict.a):.6g} -> {shown(verdict.b):.6g} {unit}, {change}"
    if verdict.low is not None and verdict.high is not None:
        change += f" [{100 * (verdict.low - 1):+.1f} %, {100 * (verdict.high - 1):+.1f} %]"
    return f"{verdict.verdict}: {change}, tolerance {verdict.tolerance}; {verdict.why}"


def _properties(comparison: Comparison) -> list[tuple[str, str]]:
    settings = comparison.settings
    return [
        ("A", comparison.names[0]),
        ("B", comparison.names[1]),
        ("seed", str(settings.seed)),
        ("resamples", str(settings.resamples)),
        ("confidence", str(settings.confidence)),
        *((d.what, f"{d.a} -> {d.b}") for d in [*comparison.config, *comparison.origin]),
    ]


def _plain(value: str) -> str:
    """Returns a text without characters that XML cannot hold, not even escaped."""
    kept = reading.text(value, _MAX_TEXT) or ""
    return kept.replace("\ufffe", "\ufffd").replace("\uffff", "\ufffd")
