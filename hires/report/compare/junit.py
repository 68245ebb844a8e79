"""How does a comparison look to a CI server? As JUnit's XML: a test case a point and metric."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from hires.core.store import reading
from hires.core.store.files import write_atomically
from hires.report.compare.comparison import Comparison
from hires.report.compare.verdicts import UNDECIDED, UNKNOWN, WORSE, Result

OPTION = "--junit FILE"
_SKIPPED = (UNKNOWN, UNDECIDED)
_MOST = 100_000
"""Characters of a text; there are no such long ones, and reading.text asks for a limit."""


def write_junit(path: Path, made: Comparison) -> None:
    """Writes a comparison.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_atomically(path, junit_text(made), option=OPTION)


def junit_text(made: Comparison) -> str:
    """Returns the XML of a comparison: what is worse failed, what is not known was skipped."""
    cases = [*made.results, *made.overall]
    counts = {
        "tests": len(cases),
        "failures": sum(case.status == WORSE for case in cases),
        "skipped": sum(case.status in _SKIPPED for case in cases),
        "errors": 0,
    }
    name = _plain(f"hires compare {made.names[0]} {made.names[1]}")
    facts = {"name": name, **{key: str(number) for key, number in counts.items()}}
    suite = ElementTree.Element("testsuite", facts)
    _properties(suite, made)
    for case in cases:
        _case(suite, case)
    root = ElementTree.Element("testsuites", suite.attrib)
    root.append(suite)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{_text(root)}\n'


def sentence(result: Result) -> str:
    """Returns a result in one sentence."""
    if result.ratio is None:
        return f"{result.verdict}: {result.why}"
    unit, shown = result.metric.unit, result.metric.shown
    ends = ""
    if result.a is not None and result.b is not None:
        ends = f"{shown(result.a):.6g} -> {shown(result.b):.6g} {unit}, "
    ratio = f"{100 * (result.ratio - 1):+.1f} %"
    if result.low is not None and result.high is not None:
        ratio += f" [{100 * (result.low - 1):+.1f} %, {100 * (result.high - 1):+.1f} %]"
    return f"{result.verdict}: {ends}{ratio}, tolerance {result.tolerance}; {result.why}"


def _properties(suite: ElementTree.Element, made: Comparison) -> None:
    """Adds how it was compared, and what differs."""
    held = ElementTree.SubElement(suite, "properties")
    settings = made.settings
    facts = [("A", made.names[0]), ("B", made.names[1]), ("seed", str(settings.seed))]
    facts += [("resamples", str(settings.resamples)), ("confidence", str(settings.confidence))]
    facts += [(d.what, f"{d.a} -> {d.b}") for d in [*made.config, *made.origin]]
    for name, value in facts:
        ElementTree.SubElement(held, "property", name=_plain(name), value=_plain(value))


def _case(suite: ElementTree.Element, result: Result) -> None:
    """Adds a test case."""
    case = ElementTree.SubElement(
        suite, "testcase", classname=f"hires.{result.metric.name}", name=_plain(result.point)
    )
    told = _plain(sentence(result))
    if result.status == WORSE:
        ElementTree.SubElement(case, "failure", message=told, type="regression").text = told
    elif result.status in _SKIPPED:
        ElementTree.SubElement(case, "skipped", message=told)
    else:
        ElementTree.SubElement(case, "system-out").text = told


def _plain(value: str) -> str:
    """Returns a text without characters that XML cannot hold, not even escaped."""
    kept = reading.text(value, _MOST) or ""
    return kept.replace("\ufffe", "\ufffd").replace("\uffff", "\ufffd")


def _text(root: ElementTree.Element) -> str:
    """Returns the XML of an element, in which ElementTree escapes what must be."""
    return ElementTree.tostring(root, encoding="unicode")
