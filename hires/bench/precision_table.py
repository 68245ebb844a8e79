"""Turns the rows of ``hires bench precision`` into tables, and judges them by its aims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hires.bench.bench_output import BenchTable, Result
from hires.bench.precision_cases import OURS, row_name
from hires.bench.step_parts import KERNELS, part_cells
from hires.bench.timing import ratios, spread
from hires.core.precisions import INT8
from hires.core.units import MIB

NOTES = """\
Medians of rounds in which all rows took turns. `best peer` is the speed beside the fastest \
library of that precision, its ratios taken round by round. `cpu ms` is the processor time of all \
threads and ranks: other work on the machine adds less to it. `kernels` counts the convolutions \
and products that ran, by the type that they read (ONNX Runtime has transposed convolutions in \
float only). Peaks of memory are of one step and the weights, without the libraries, of the \
fullest process; what a compiler leaves in it counts.

`agrees` is the share of classes (pixels, for a U-Net) that are those of fp32 on the same images, \
`signal` the outputs over their error. Without `--weights` the network is random, with the \
statistics of the images that 8 bits are calibrated on (`--calibration`); without `--data` the \
images are made up, and those that are measured are among them. ONNX Runtime and OpenVINO \
calibrate on them one by one, on the middle 512x512 pixels of larger ones, as they hold every \
value of the network at once. A random network says little about accuracy: one image agrees or \
does not, and AmoebaNet-D makes so much of rounding that two libraries in fp32 agree to 23 to \
30 dB. Trained networks are compared in `results/table2.2`.

`limit` is what an aim would be if nothing but oneDNN's kernels took time in the step of hires: \
what is missing above it is the kernels', below it hires' own. The kernels are those of one more \
step right after each that is timed, and the ratios are taken round by round. The last table \
takes a step of hires apart, its first tile's: the kernels as above, calls that send and post, \
waits for the other tile, and the rest. `-` as a limit or a rest means that kernels took longer \
than the timed step has room for: the pace of the machine changed too much to tell."""
TILES = "hires, 2 tiles"
PEER_AIM, TILES_AIM, INT8_AIM = 1.0, 1.7, 4.0
"""Least speed beside the best peer, of two tiles beside one thread, of 8 bits beside our fp32."""
Row = dict[str, Any]


def tables(result: Result) -> list[BenchTable]:
    """Returns the tables of each case: its rows, the aims, and the parts of a step of hires."""
    made = []
    for title, rows in result["cases"].items():
        made.append(BenchTable(title, [_cells(row, rows) for row in rows]))
        made.append(BenchTable(f"{title}: aims", [aim.cells() for aim in aims(rows)]))
        parts = [cells for row in rows if (cells := part_cells(row))]
        made += [BenchTable(f"{title}: parts of a step", parts)] if parts else []
    return made


def best_peer(rows: Sequence[Row], precision: str) -> Row | None:
    """Returns the fastest row of another library at a precision; None: there is none."""
    ran = [row for row in _peers(rows, precision) if row["ok"] and "step_s" in row]
    return min(ran, key=lambda row: row["step_s"]["median"], default=None)


def _peers(rows: Sequence[Row], precision: str) -> list[Row]:
    return [row for row in rows if row["who"] not in OURS and row["precision"] == precision]


@dataclass(frozen=True)
class Aim:
    """A ratio of two speeds, and the least that it should be."""

    what: str
    least: float
    measured: float | None
    """None: it was not measured."""
    reason: str = ""
    """Why it was not."""
    limit: float | None = None
    """The ratio if only the kernels of hires took time; None: it has no valid measurement."""

    def cells(self) -> dict[str, str]:
        """Returns a line of the table of aims."""
        shown, verdict = "-", f"not measured: {self.reason}"
        if self.measured is not None:
            shown = f"{self.measured:.2f}"
            verdict = "met" if round(self.measured, 2) >= self.least else "short"  # as it is shown
        limit = "-" if self.limit is None else f"{self.limit:.2f}"
        cells = {"what": self.what, "measured": shown, "aim": f"{self.least:.1f}"}
        return {**cells, "limit": limit, "": verdict}


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Returns what is aimed at and the measured ratios; peers that did not run have aims too."""
    listed: list[Aim] = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        ours, best = row_name("hires", precision), best_peer(rows, precision)
        missing = [r for r in _peers(rows, precision) if _why_not(rows, r["name"])]
        for peer in ([best] if best else []) + missing:
            what = f"{precision} beside {peer['name']}"
            listed.append(_aim(what, PEER_AIM, rows, peer["name"], ours))
        if not best and not missing:
            reason = f"no library of --peers runs {precision}"
            listed.append(Aim(f"{precision} beside the best peer", PEER_AIM, None, reason))
        what = f"{precision}, two tiles beside one"
        listed.append(_aim(what, TILES_AIM, rows, ours, row_name(TILES, precision)))
        if precision == INT8:
            what, plain = f"{INT8} beside fp32 of hires", row_name("hires", "fp32")
            listed.append(_aim(what, INT8_AIM, rows, plain, ours))
    return listed


def _aim(what: str, least: float, rows: Sequence[Row], over: str, under: str) -> Aim:
    # The speed of the row `under` in units of that of the row `over`.
    reasons = [why for name in (over, under) if (why := _why_not(rows, name))]
    if reasons:
        return Aim(what, least, None, "; ".join(reasons))
    named = {row["name"]: row for row in rows}
    measured = _ratio(named[over], named[under])
    return Aim(what, least, measured, limit=_limit(named[over], named[under], measured))


def _limit(over: Row, under: Row, measured: float) -> float | None:
    kernels_s = under.get(KERNELS, [])
    if not kernels_s or not all(kernels_s):  # other libraries, or no kernel of oneDNN
        return None
    limit = ratios(over["samples_s"], kernels_s)["median"]
    return limit if limit >= measured else None  # kernels by themselves were slower than the step


def _why_not(rows: Sequence[Row], name: str) -> str:
    # Why a row has no speed to compare; empty: it has one.
    row = next((row for row in rows if row["name"] == name), None)
    if row is None:
        return f"there is no row {name}"
    if "not_run" in row:
        return str(row["not_run"])
    if "step_s" not in row:
        return f"{name} has no sample"
    return "" if row["ok"] else f"{name} is wrong: {row['wrong']}"


def _ratio(over: Row, under: Row) -> float:
    return ratios(over["samples_s"], under["samples_s"])["median"]


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
