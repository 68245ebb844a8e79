"""How are simulated steps and predicted ratios shown and kept?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hires.bench.answers import columns, header, markdown
from hires.bench.thesis import CANNOT

RUNS = ("run", "ranks", "measured ms", "simulated ms", "error", "bubble")
THESIS = (
    "ratio", "thesis", "network", "image", "batch", "GPUs", "layout", "over", "predicted",
    "published", "note",
)  # fmt: skip
RUN_NOTES = """\
The simulation of a step is given the seconds that its own actions computed, between one collective
and the next, and the latency and bandwidth that two ranks of this machine measured just before. It
tells whether waits follow from these alone. Ranks that share cores with each other or with other
programs slow their messages down, which no link model knows."""


def text(found: dict[str, Any]) -> str:
    """Returns the tables for the screen."""
    parts = []
    for title, headings, cells, notes in _tables(found):
        drawn = columns([headings, *cells], "l" * len(headings))
        parts.append("\n".join([title, *drawn, "", notes]))
    return "\n\n".join(parts) + "\n"


def readme(name: str, found: dict[str, Any]) -> str:
    """Returns the numbers beside command, machine and commit."""
    lines = header(name, found, load=False)
    for title, headings, cells, notes in _tables(found):
        lines += ["", f"## {title}", "", *markdown([headings, *cells], "l" * len(headings))]
        lines += ["", notes]
    return "\n".join(lines) + "\n"


def _tables(found: dict[str, Any]) -> list[tuple[str, Sequence[str], list[Sequence[str]], str]]:
    """Returns title, headings, rows and notes of every table."""
    tables: list[tuple[str, Sequence[str], list[Sequence[str]], str]] = []
    if "runs" in found:
        cells: list[Sequence[str]] = [_run_cells(row) for row in found["runs"]]
        tables.append(("Steps on this machine", RUNS, cells, f"{_network(found)}\n{RUN_NOTES}"))
    if "thesis" in found:
        cells = [_thesis_cells(row) for row in found["thesis"]]
        title = "Ratios of images per second, predicted beside published"
        tables.append((title, THESIS, cells, f"{_device(found)}\n{CANNOT}"))
    return tables


def _run_cells(row: dict[str, Any]) -> list[str]:
    """Returns a compared run as text."""
    return [
        row["run"],
        str(row["ranks"]),
        f"{row['measured_s'] * 1e3:.1f}",
        f"{row['simulated_s'] * 1e3:.1f}",
        f"{row['error']:+.1%}",
        f"{row['bubble']:.0%}",
    ]


def _thesis_cells(row: dict[str, Any]) -> list[str]:
    """Returns a predicted ratio as text."""
    return [
        row["what"],
        row["where"],
        row["model"],
        str(row["image"]),
        str(row["batch"]),
        str(row["layout"]["gpus"]),
        row["layout"]["name"],
        row["base"]["name"],
        f"{row['predicted']:.2f}",
        "-" if row["published"] is None else f"{row['published']:.1f}",
        row["note"] or "-",
    ]


def _network(found: dict[str, Any]) -> str:
    """Returns the measured links in words."""
    near = found["network"]["near"]
    return (
        f"Links: {near['latency_s'] * 1e6:.0f} us, {near['bytes_per_s'] / 1e9:.1f} GB/s; a small "
        f"gather {found['network']['small_latency_s'] * 1e6:.0f} us."
    )


def _device(found: dict[str, Any]) -> str:
    """Returns the model of the device and its links in words."""
    speeds = ", ".join(
        f"{name} {device['flops_per_s'] / 1e12:.2f} TFLOP/s"
        for name, device in found["devices"].items()
    )
    device = next(iter(found["devices"].values()))
    near, far = found["cluster"]["near"], found["cluster"]["far"]
    return (
        f"Device: an A100 that reaches {speeds} in convolutions (so that ResNet-101 at 256x256 in "
        f"batches of 64 infers as fast as in Table 2.1), {device['bytes_per_s'] / 1e9:.0f} GB/s "
        f"from memory, {device['launch_s'] * 1e6:.0f} us for the smallest operation. Links: "
        f"{near['bytes_per_s'] / 1e9:.0f} GB/s and {near['latency_s'] * 1e6:.0f} us in a node of "
        f"{found['cluster']['ranks_per_node']}, {far['bytes_per_s'] / 1e9:.1f} GB/s and "
        f"{far['latency_s'] * 1e6:.0f} us between nodes."
    )
