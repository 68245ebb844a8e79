"""How long does a message take on each kind of link? From the record of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hires.core.units import MIB
from hires.report.load import reading
from hires.report.load.reading import Note, dig, number
from hires.report.plots import style
from hires.report.plots.base import Material, Plot

FILE = "simulate.json"
"""What ``hires bench simulate --out DIR`` writes; it holds the links that it measured."""
_SIZES = [2**power for power in range(3, 27)]
_LINKS = {
    "near": ("within a node", style.BLUE, "-"),
    "far": ("between nodes", style.VERMILION, "--"),
}


def read_benches(results: Path, notes: list[Note]) -> list[dict[str, Any]]:
    """Returns the records of benchmarks under a folder of results."""
    files = sorted(results.glob(f"*/{FILE}"))
    return [values for file in files if (values := reading.read_json(file, notes))]


def links(material: Material) -> Plot:
    """Returns how long a message of each size takes, by latency and bandwidth."""
    plot = Plot("links", "Latency and bandwidth")
    found = [item for bench in material.benches for item in _links(bench)]
    if not found:
        plot.missing = "no record of `hires bench simulate --out DIR` lies beside the runs"
        return plot
    made, axes = style.figure(1, 2, 3.2)
    for label, colour, line, latency_s, rate in found:
        took = [latency_s + num_bytes / rate for num_bytes in _SIZES]
        speed = [n / t / MIB for n, t in zip(_SIZES, took, strict=True)]
        shown = {"color": colour, "ls": line, "label": label}
        axes[0][0].plot(_SIZES, [t * 1e6 for t in took], **shown)
        axes[0][1].plot(_SIZES, speed, **shown)
    for axis, title, unit in (
        (axes[0][0], "time of a message", "microseconds"),
        (axes[0][1], "bandwidth", "MiB/s"),
    ):
        style.log_axis(axis, "x", 2)
        style.log_axis(axis, "y")
        axis.set_xticks([2**10, 2**20, 2**26], ["1 KiB", "1 MiB", "64 MiB"])
        axis.set_xlabel("size of a message")
        axis.set_ylabel(unit)
        axis.set_title(title)
    style.legend(made, axes[0])
    plot.figure = made
    said = [f"{label} {lat * 1e6:.0f} us and {r / MIB:.0f} MiB/s" for label, _, _, lat, r in found]
    plot.caption = (
        f"Lines are a model from two measured numbers, latency and bandwidth: {'; '.join(said)}."
    )
    plot.setting = f"bench, measured on {', '.join(_hosts(material))}"
    return plot


def _hosts(material: Material) -> list[str]:
    """Returns the machines of the benchmarks, with what they compute on."""
    found = []
    for bench in material.benches:
        if _links(bench):
            words = [_host(bench), reading.text(dig(bench, "hardware", "cpu"), 60) or ""]
            found.append(" ".join(word for word in words if word))
    return list(dict.fromkeys(found))


def _host(bench: dict[str, Any]) -> str:
    """Returns the name of the machine that a benchmark ran on."""
    return reading.text(bench.get("host"), 30) or "unknown host"


def _links(bench: dict[str, Any]) -> list[tuple[str, str, str, float, float]]:
    """Returns label, colour, line, latency and bytes per second of the links of a record."""
    host = _host(bench)
    kept = []
    for key, (what, colour, line) in _LINKS.items():
        latency_s = number(dig(bench, "network", key, "latency_s"))
        rate = number(dig(bench, "network", key, "bytes_per_s"))
        if latency_s is None or not rate or latency_s < 0 or rate < 0:
            continue
        if key == "far" and dig(bench, "network", "far") == dig(bench, "network", "near"):
            continue  # it has one node
        kept.append((f"gloo {what} ({host})", colour, line, latency_s, rate))
    return kept
