"""Plots how long a message takes on each kind of link, from the record of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hires.core.store import reading
from hires.core.store.reading import Note
from hires.core.units import MIB
from hires.report.plots import style
from hires.report.plots.base import Drawing, PlotData, plot
from hires.report.read.plain_values import dig, number

FILE = "simulate.json"
"""What ``hires bench simulate --out DIR`` writes; it holds the links that were measured."""
_SIZES = 2.0 ** np.arange(3, 27)
_KINDS = {
    "near": ("within a node", {"color": style.BLUE, "ls": "-"}),
    "far": ("between nodes", {"color": style.VERMILION, "ls": "--"}),
}


class _Link(NamedTuple):
    label: str
    host: str
    look: dict[str, Any]  # options of ``Axes.plot``
    latency_s: float
    bytes_per_s: float


def read_benches(results: Path, notes: list[Note]) -> list[dict[str, Any]]:
    """Returns the records of benchmarks in a folder of results."""
    files = sorted(results.glob(f"*/{FILE}"))
    return [values for file in files if (values := reading.read_json(file, notes))]


@plot(120, "links", "Latency and bandwidth")
def links(data: PlotData) -> Drawing | str:
    """Draws how long a message of each size takes, by latency and bandwidth."""
    measured = [link for bench in data.benches for link in _links(bench)]
    if not measured:
        return "no record of `hires bench simulate --out DIR` lies beside the runs"
    fig, [times, rates] = style.panels(2, 2, 2.7)
    for link in measured:
        took_s = link.latency_s + _SIZES / link.bytes_per_s
        times.plot(_SIZES, 1e6 * took_s, label=link.label, **link.look)
        rates.plot(_SIZES, _SIZES / took_s / MIB, label=link.label, **link.look)
    titles = ((times, "time of a message", "microseconds"), (rates, "bandwidth", "MiB/s"))
    for axis, title, unit in titles:
        style.log_axis(axis, "x", 2)
        style.log_axis(axis, "y")
        axis.set_xticks([2**10, 2**20, 2**26], ["1 KiB", "1 MiB", "64 MiB"])
        axis.set(xlabel="size of a message", ylabel=unit, title=title)
    style.legend(fig, (times, rates))
    words = "; ".join(
        f"{link.label} {link.latency_s * 1e6:.0f} us and {link.bytes_per_s / MIB:.0f} MiB/s"
        for link in measured
    )
    caption = f"Lines are a model from two measured numbers, latency and bandwidth: {words}."
    hosts = ", ".join(dict.fromkeys(link.host for link in measured))
    return Drawing(fig, caption, f"bench, measured on {hosts}")


def _links(bench: dict[str, Any]) -> list[_Link]:
    host = reading.text(bench.get("host"), 30) or "unknown host"
    processor = reading.text(dig(bench, "hardware", "cpu"), 60) or ""
    links = []
    for key, (where, look) in _KINDS.items():
        latency_s = number(dig(bench, "network", key, "latency_s"))
        rate = number(dig(bench, "network", key, "bytes_per_s"))
        if latency_s is None or not rate or latency_s < 0 or rate < 0:
            continue
        if key == "far" and dig(bench, "network", "far") == dig(bench, "network", "near"):
            continue  # measured on one node
        label = f"gloo {where} ({host})"
        links.append(_Link(label, f"{host} {processor}".strip(), look, latency_s, rate))
    return links
