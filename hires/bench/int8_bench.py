"""Compares networks in 8 bits in many layouts with one process, bit by bit: ``hires bench int8``.

``python -m hires.bench.int8_bench`` calibrates each network, runs one step of each layout on real
ranks and compares all outputs with those of one process. Exit codes: 0 all have the same bits, 1
some layout has not, 2 bad options.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hires.bench.bench_output import Benchmark, BenchTable, Result, Results, option
from hires.bench.compared_step import Settings, overrides
from hires.bench.contestants import bench_data
from hires.bench.networks_bench import BenchedNetwork, Row, compared, reasons
from hires.bench.ranks import run_program
from hires.core.errors import ConfigError, RunError
from hires.core.precisions import INT8
from hires.core.python_command import module_command
from hires.core.store import file_names
from hires.quant.scales import read_scales

_DATA = bench_data("int8.yaml")
_CALIBRATION: Settings = {"quant.calibration": "noise", "quant.images": 8}
_SCALES = "quant.scales"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Int8Options:
    """The options of ``hires bench int8``."""

    only: str = option("*", "patterns of networks with commas between, as 'ResNet*,EDSR'")
    timeout: float = option(300.0, "seconds for one calibration or one layout")
    memory: float = option(5.0, "GiB for one process")


def measure(options: Int8Options) -> Results:
    """Yields all rows after each new one, and whether all bits are the same."""
    rows: list[Row] = []
    for network in chosen(options.only):
        rows.append(row_of(network, options))
        yield {"ok": all(row["ok"] for row in rows), "rows": rows}
        height, width = rows[-1]["image"]
        log.info(
            "%s at %dx%d: %.0f s, %s",
            *(network.name, height, width, rows[-1]["seconds"]),
            "same bits" if rows[-1]["ok"] else f"not the same in {', '.join(reasons(rows[-1]))}",
        )


def chosen(only: str) -> Iterator[BenchedNetwork]:
    """Yields each network at each size; ConfigError: the patterns match none."""
    patterns = only.split(",")
    names = [n for n in _DATA["networks"] if any(fnmatch.fnmatch(n, one) for one in patterns)]
    if not names:
        raise ConfigError(f"--only {only!r} matches none of {', '.join(_DATA['networks'])}")
    for name in names:
        model = {f"model.{key}": value for key, value in _DATA["networks"][name].items()}
        for image in _DATA["images"]:
            own = {"image": image, "precision.name": INT8, "task.name": "infer"}
            yield BenchedNetwork(
                "hires", name, {**_DATA["every"], **model, **own}, _DATA["layouts"]
            )


def row_of(network: BenchedNetwork, options: Int8Options) -> Row:
    """Returns the row of a network: each layout's answer, with the scales of one calibration."""
    image = network.settings["image"]
    with tempfile.TemporaryDirectory(prefix="hires-int8-") as folder:
        scales = Path(folder) / file_names.SCALES
        try:
            _calibrate(network, scales, options.timeout)
        except RunError as error:
            facts = {"network": network.name, "layouts": {}, "seconds": 0.0, "ok": False}
            return {**facts, "image": image, "failure": str(error)}
        settings = {**network.settings, _SCALES: str(scales)}
        row = compared(replace(network, settings=settings), options.timeout, options.memory)
        made = read_scales(scales)
        row |= {"values": len(made.values), "least_db": min(made.noise.values(), default=None)}
    for answer in row["layouts"].values():
        words = (w for w in shlex.split(answer["again"]) if not w.startswith(f"{_SCALES}="))
        answer["again"] = shlex.join([*words, *overrides(_CALIBRATION)])
    return {**row, "image": image}


def _calibrate(network: BenchedNetwork, scales: Path, timeout_s: float) -> None:
    settings = {**network.in_layout({}), **_CALIBRATION, "results": str(scales.parent)}
    command = module_command("hires", "quantize", *overrides(settings), f"out={scales}")
    run_program(f"the calibration of {network.name}", command, timeout_s)


def _facts(result: Result) -> list[str]:
    answers = [answer for row in result["rows"] for answer in row["layouts"].values()]
    equal = sum(answer["ok"] for answer in answers)
    whole = f"{equal} of {len(answers)} layouts have the bits of one process"
    failed = [row["network"] for row in result["rows"] if not row["layouts"]]
    return [whole, *([f"not compared: {', '.join(failed)}"] if failed else [])]


def _tables(result: Result) -> list[BenchTable]:
    failed = [(row, *reason) for row in result["rows"] for reason in reasons(row).items()]
    return [
        BenchTable("Bits of one process", [*map(_cells, result["rows"])]),
        BenchTable(
            "Not the same",
            [
                {"network": row["network"], "layout": name, "reason": reason}
                for row, name, reason in failed
            ],
        ),
    ]


def _cells(row: Row) -> dict[str, str]:
    height, width = row["image"]
    cells = {"network": row["network"], "image": f"{height}x{width}"}
    cells |= {key: f"{row[key]:,}" if key in row else "-" for key in ("parameters", "values")}
    least = row.get("least_db")
    cells["least dB"] = "-" if least is None else f"{least:.0f}"
    for name in _DATA["layouts"]:
        answer: dict[str, Any] = row["layouts"].get(name, {})
        cells[name] = "same" if answer.get("ok") else "DIFFERENT" if answer else "-"
    return {**cells, "seconds": f"{row['seconds']:.0f}"}


BENCHMARK = Benchmark("int8", __doc__, Int8Options, measure, _tables, _DATA["note"], _facts)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(BENCHMARK.main(sys.argv[1:]))
