"""Turns the rows of ``hires bench precision`` into tables, and judges them by its aims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hires.bench.bench_output import BenchTable, Result
from hires.bench.precision_cases import OURS, row_name
from hires.bench.timing import ratios, spread
from hires.core.precisions import INT8
from hires.core.units import MIB

NOTES = """\
Medians of rounds in which all rows took turns. `best peer` is the speed beside the fastest library
of that precision, its ratios taken round by round. `cpu ms` is the processor time of all threads
and ranks: other work on the machine adds less to it. `kernels` counts the convolutions and products
that ran, by the type that they read. `agrees` is the share of classes (pixels, for a U-Net) that
are those of fp32 on the same images, `signal` the outputs over their error. Without `--weights` the
network is random, with the statistics of two of the images; without `--data` the images are made
up, and 8 bits are calibrated on those that are measured, among others. Peaks of memory are of one
step and the weights, without the libraries, of the fullest process; what a compiler leaves in it
counts."""
TILES = "hires, 2 tiles"
PEER_AIM, TILES_AIM, INT8_AIM = 1.0, 1.7, 4.0
"""Least speed beside the best peer, of two tiles beside one thread, of 8 bits beside our fp32."""
Row = dict[str, Any]


def tables(result: Result) -> list[BenchTable]:
    """Returns two tables for each case: its rows, and the aims."""
    made = []
    for title, rows in result["cases"].items():
        made.append(BenchTable(title, [_cells(row, rows) for row in rows]))
        made.append(BenchTable(f"{title}: aims", [*map(_aim_cells, aims(rows))]))
    return made


def best_peer(rows: Sequence[Row], precision: str) -> Row | None:
    """Returns the fastest row of another library at a precision; None: there is none."""
    peers = [r for r in rows if r["who"] not in OURS and r["precision"] == precision]
    ran = [row for row in peers if row["ok"] and "step_s" in row]
    return min(ran, key=lambda row: row["step_s"]["median"], default=None)


def aims(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Returns what is aimed at, the least ratio, and the measured one."""
    named = {row["name"]: row for row in rows if "step_s" in row}
    found = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        ours, peer = named.get(row_name("hires", precision)), best_peer(rows, precision)
        tiles = named.get(row_name(TILES, precision))
        if ours and peer:
            what = f"{precision} beside {peer['name']}"
            found.append((what, PEER_AIM, _ratio(peer, ours)))
        if ours and tiles:
            found.append((f"{precision}, two tiles beside one", TILES_AIM, _ratio(ours, tiles)))
    eight, plain = named.get(row_name("hires", INT8)), named.get(row_name("hires", "fp32"))
    if eight and plain:
        found.append((f"{INT8} beside fp32 of hires", INT8_AIM, _ratio(plain, eight)))
    return found


def _ratio(over: Row, under: Row) -> float:
    return ratios(over["samples_s"], under["samples_s"])["median"]


def _aim_cells(aim: tuple[str, float, float]) -> dict[str, str]:
    what, least, measured = aim
    met = "met" if round(measured, 2) >= least else "short"  # as it is shown
    return {"what": what, "measured": f"{measured:.2f}", "aim": f"{least:.1f}", "": met}


def _cells(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    heads = "img/s", "p10 ms", "p90 ms", "cpu ms", "best peer", "MiB", "agrees", "signal dB"
    cells = {**dict.fromkeys(heads, "-"), "kernels": ""}
    if "not_run" in row:
        cells["kernels"] = f"not run: {row['not_run']}"
    elif "step_s" in row:
        took, peer = spread(row["samples_s"]), best_peer(rows, row["precision"])
        cells["img/s"] = f"{row['images_per_s']:.2f}"
        cells |= {f"{end} ms": f"{took[end] * 1e3:.1f}" for end in ("p10", "p90")}
        cells["cpu ms"] = f"{row['cpu_s'] * 1e3:.1f}"
        cells["best peer"] = f"{_ratio(peer, row):.2f}" if peer else "-"
        cells["MiB"] = f"{row['peak_bytes'] / MIB:.0f}" if row["peak_bytes"] is not None else "-"
        cells["agrees"] = f"{row['agreement']:.3f}"
        cells["signal dB"] = f"{row['signal_db']:.1f}"
        counts = ", ".join(f"{count} {kind}" for kind, count in row["kernels"].items())
        cells["kernels"] = counts or "none of oneDNN"
        if row["wrong"]:
            cells["kernels"] += f" WRONG: {row['wrong']}"
    return {"row": row["name"], **cells}
