"""Which rows answer one question together? Their ratios, beside what the thesis publishes.

Both rows of a pair ran in the same rounds, so the ratio of each round is one sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hires.bench.timing import ratios
from hires.core.units import MIB

HEADINGS = ("ratio", "images/s", "peak memory", "the thesis")
NOTE = """\
`images/s` is that of the first row over that of the second, the median of ratios taken within each
round (p10 to p90); `peak memory` is that of the fullest rank of each. The thesis ran on A100s.
Two cores tell what a layout's own work costs: halos, statistics, waits, recomputation, and how well
two ranks share one image. They cannot tell what GPUs gain from more memory, since nothing here runs
out of it, nor what more ranks than cores gain: where three ranks share two cores, the ratio is one
of work, not of time saved. `hires bench simulate` predicts those from the same plans."""


class Pair(NamedTuple):
    """Two rows and what is known about their ratio."""

    ratio: str
    over: str
    under: str
    published: str = "-"


PAIRS = (
    Pair("SP over PP", "tiles 2x1", "pp gpipe", "1.5 to 2.4 (AmoebaNet, Figures 3.13, 3.14)"),
    Pair("GEMS over LP", "gems", "lp"),
    Pair("GEMS with microbatches over LP", "gems_1f1b", "lp"),
    Pair("GEMS with microbatches over 1F1B", "gems_1f1b", "pp 1f1b"),
    Pair("SP+GEMS over SP+LP", "sp+gems", "sp+lp", "up to 2.5 and 2.0 (Figures 3.15, 3.16)"),
    Pair("SP+PP+GEMS over SP+PP", "sp+pp+gems", "sp+pp"),
    Pair("overlap on over off", "overlap on", "overlap off"),
    Pair("overlap auto over off", "tiles 2x1", "overlap off"),
    Pair("halos of 2 layers fused over not", "fuse 2", "tiles 2x1"),
    Pair("halos of 3 layers fused over not", "fuse 3", "tiles 2x1"),
    Pair("blocks computed again over kept", "block again, single", "single"),
    Pair("stage computed again over kept", "stage again, single", "single"),
    Pair("blocks computed again over kept, 2 tiles", "block again, tiles", "tiles 2x1"),
)


def pairs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the ratios of all pairs whose two rows were measured, as plain values."""
    by_name = {row["name"]: row for row in rows}
    found = []
    for pair in PAIRS:
        over, under = by_name.get(pair.over), by_name.get(pair.under)
        if over is None or under is None:
            continue
        share = over["images"] / under["images"]
        speed = ratios(under["samples_s"], over["samples_s"])
        peaks = [_peak(over), _peak(under)]
        found.append(
            {
                "ratio": pair.ratio,
                "rows": [pair.over, pair.under],
                "images_per_s": [share * n for n in (speed.median, speed.p10, speed.p90)],
                "peak_bytes": peaks if None not in peaks else None,
                "published": pair.published,
            }
        )
    return found


def cells(found: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the ratios as text."""
    return [
        [
            f"{row['ratio']}",
            _speed(*row["images_per_s"]),
            _memory(row["peak_bytes"]),
            row["published"],
        ]
        for row in found
    ]


def _peak(row: dict[str, Any]) -> int | None:
    """Returns the peak of a row's fullest rank, if it was measured."""
    peaks = [entry["measured_bytes"] for entry in row.get("memory") or ()]
    return None if not peaks or None in peaks else max(peaks)


def _speed(median: float, p10: float, p90: float) -> str:
    """Returns a ratio with its p10 and p90."""
    return f"{median:.2f} ({p10:.2f}-{p90:.2f})"


def _memory(peaks: list[int] | None) -> str:
    """Returns the ratio of two peaks, and the peaks."""
    if peaks is None:
        return "-"
    return f"{peaks[0] / peaks[1]:.2f} ({peaks[0] / MIB:.0f} / {peaks[1] / MIB:.0f} MiB)"
