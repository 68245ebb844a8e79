"""Measures broadcasts: the libraries' own, chains of segments, and chains of codes.

In shared memory, and on links of a rate that this machine stands in for (``--link``). Ratios are
taken round by round: how many times as long the other way takes, and by how much less this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hires.bench.bench_main import BenchTable, Result, Row, result_of
from hires.bench.coded_broadcasts import CODED, HOPS
from hires.bench.comm_bench import RAW_MPI4PY, cells_of, has_mpi, noise_facts, sweep
from hires.bench.emulated_link import emulated_hosts, require_links
from hires.bench.race import ratios
from hires.core.units import size
from hires.plan.hardware import GLOO, MPI

SHM, SEGMENT, CODECS = "shm", "1MiB", ("bf16", "int8")
LEAST_BYTES = 4096


def measure(task: Mapping[str, Any]) -> Iterator[Result]:
    """Yields all rows by place and number of ranks, after each cell."""
    sizes = [one for one in task["sizes"] if one >= LEAST_BYTES] or task["sizes"]
    cells = cells_of(["broadcast"], sizes, ["float32"])
    if task["link"]:  # before minutes of measuring what needs none
        require_links(task["link"], task["start"])
    before, done = task.get("before", {}), dict[str, list[Row]]()
    for place in ("", *([task["link"]] if task["link"] else [])):
        known = {title: rows for title, rows in before.items() if _is_at(title, place)}
        groups: dict[str, list[Row]] = {}
        for groups in _measured({**task, "before": known}, cells, place):
            every = {**done, **groups}
            yield result_of(every, [*_facts(task, every), *noise_facts(every)])
        done |= groups


def _measured(
    task: Mapping[str, Any], cells: Sequence[Any], place: str
) -> Iterator[dict[str, list[Row]]]:
    if not place:
        yield from sweep(task, cells, ways_of(task, bool(task["hosts"])))
        return
    with emulated_hosts(max(task["ranks"]), place, task["start"]) as hosts:
        yield from sweep({**task, "hosts": hosts, "place": place}, cells, ways_of(task, True))


def _is_at(title: str, place: str) -> bool:
    return title.endswith(f", {place}") if place else title.endswith("ranks")


def ways_of(task: Mapping[str, Any], is_far: bool) -> list[str]:
    """Returns the libraries' own broadcasts and the chains on them; no shared memory if far."""
    if task["routes"]:
        chains = [route for route in task["routes"] if ":segmented:" in route]
        libraries = [route for route in task["routes"] if route not in chains]
    else:
        libraries = [*[MPI] * has_mpi(task), GLOO if is_far else SHM]
        chains = [f"{name}:segmented:{SEGMENT}" for name in libraries]
    coded = [f"{c}{CODED}{codec}{end}" for c in chains for codec in CODECS for end in ("", HOPS)]
    return [*libraries, *[RAW_MPI4PY] * (MPI in libraries), *chains, *coded]


def _facts(task: Mapping[str, Any], groups: Mapping[str, Sequence[Row]]) -> list[str]:
    facts = [f"ranks started by {task['start']}"]
    for title, rows in groups.items():
        largest = max(row["num_bytes"] for row in rows)
        timed = {r["name"]: r for r in rows if r["num_bytes"] == largest and "step_s" in r}
        libraries = [name for name in timed if ":segmented" not in name]
        for name in (name for name in timed if CODED in name and not name.endswith(HOPS)):
            plain, others = name.partition(CODED)[0], [*libraries]
            others += [one for one in (plain, f"{name}{HOPS}") if one in timed]
            texts = [f"{other} {_lower(timed[other], timed[name])}" for other in others]
            facts.append(f"{title}, {size(largest)}, {name} beside {'; '.join(texts)}")
    return facts


def _lower(other: Row, row: Row) -> str:
    spread = ratios(other["rounds_s"], row["rounds_s"])
    low, middle, high = (spread[key] for key in ("p10", "median", "p90"))
    return f"{middle:.2f} times ({low:.2f} to {high:.2f}), {100 * (1 / middle - 1):+.1f} %"


def tables(result: Result) -> list[BenchTable]:
    """Returns a table for each place and number of ranks: medians, p10 and p90."""
    return [_table(title, rows) for title, rows in result["groups"].items()]


def _table(title: str, rows: Sequence[Row]) -> BenchTable:
    ways = [*dict.fromkeys(row["name"] for row in rows)]
    cells: dict[int, dict[str, str]] = {}
    for row in rows:
        line = cells.setdefault(row["num_bytes"], dict.fromkeys(ways, "-"))
        took = row.get("step_s")
        if took:
            median, low, high = (f"{1e3 * took[key]:.3g}" for key in ("median", "p10", "p90"))
            line[row["name"]] = f"{median} ({low}-{high})" if row["ok"] else "WRONG"
    lines = [{"size": size(number), **line} for number, line in cells.items()]
    return BenchTable(f"{title}, ms: median (p10-p90)", lines)
