"""``hires bench``: measure layouts beside torch's own, messages through every library, and more.

The rows are composed here; what runs them needs torch, so this process becomes
``python -m hires.bench.bench_main``, signals and all. Messages have options of their own.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from hires.cli.compose_config import Composer, config_of
from hires.cli.data_keys import resolve_data
from hires.cli.options import JSON, Option, Parser, chosen, composing, flag, number, option
from hires.cli.overrides import key_in
from hires.cli.screen import print_config
from hires.core.config.fields import Section, build, value
from hires.core.config.launcher_config import DIALECTS
from hires.core.config.run_config import from_dict, to_dict
from hires.core.errors import ConfigError
from hires.core.programs import module_command
from hires.core.ranks import mpi_starter
from hires.core.registry import offer
from hires.core.store.reading import read_named_values
from hires.core.units import parse_size
from hires.plan.routes import DTYPES, parse_route

SUBVERBS = {
    "layouts": "tiles, pipelines and replicas beside one process and torch's own",
    "precision": "inference in fp32, bf16 and int8 beside torch, ONNX Runtime and OpenVINO",
    "choose": "layouts that hires plan --choose lists, predicted beside measured",
    "comm": "messages through every backend beside raw libraries (hires bench comm --help)",
}
TYPES = [name for names in DTYPES.values() for name in names if name[:4] not in ("comp", "bool")]
OUT = option(
    "--out",
    "FOLDER",
    "keep README.md and JSON there; the same command resumes a stopped measurement",
    default="",
)
TIMEOUT = number("--timeout", "seconds for each start of ranks", default=3600)
PARSER = Parser(
    "bench",
    (
        "hires bench layouts model=resnet101 image=512 --out results/layouts",
        "hires bench precision model=unet image=256 batch=8 --only 'fp32,hires*'",
        "hires bench comm --only all_reduce,latency --sizes 16..1MiB",
    ),
    option("rows", "ROWS", f"{', '.join(SUBVERBS)}, or a YAML file of rows"),
    *composing(),
    option("--only", "NAMES", "groups or names of rows, with * and commas", default="*"),
    number("--rounds", "samples of every row", default=15),
    number("--warmup", "rounds before them", default=1, least=0),
    TIMEOUT,
    OUT,
    JSON,
    more="benchmarks:\n" + "\n".join(f"  {name:<10}{what}" for name, what in SUBVERBS.items()),
)
OPERATIONS = (
    *("bandwidth", "bidirectional", "latency", "all_reduce", "reduce", "broadcast"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "gather", "scatter"),
    "barrier",
)
TUNED = OPERATIONS[2:]
"""Operations of which a tuning table has rules."""
UNROUTED = ("table", "raw:gloo", "raw:mpi4py")
"""What ``--routes`` may name besides routes."""


def _sizes(text: str) -> list[int]:
    # ``4,64KiB``, or all powers of two of ``4..64MiB``.
    sizes: set[int] = set()
    for part in text.split(","):
        bounds = [parse_size(end) or 0 for end in part.split("..")]
        at, last = bounds[0], bounds[-1]
        if not 0 < at <= last or len(bounds) > 2:
            raise ConfigError(f"--sizes {part} is no size; write 64KiB or 4..64MiB")
        while at <= last:
            sizes.add(at)
            at *= 2
    return sorted(sizes)


def _routes(text: str) -> list[str]:
    routes = [word.strip() for word in text.split(",") if word.strip()]
    for route in (route for route in routes if route not in UNROUTED):
        parse_route(route)
    return [*dict.fromkeys(routes)]


def _ranks(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 1 for word in words):
        raise ConfigError(f"--ranks {text}: write numbers above 1, as 2,4")
    return sorted({*map(int, words)})


def _seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) < math.inf:
        raise ConfigError(f"--seconds {text}: write a number above 0, as 0.2")
    return seconds


def _rate(text: str) -> str:
    if text and re.fullmatch(r"[1-9]\d*(K|M|G)bit", text) is None:
        raise ConfigError(f"--link {text} is no rate; write 10Gbit or 100Mbit")
    return text


def _starter(text: str) -> str:
    # ``auto`` is an MPI if there is one, else torchrun. Without an MPI of its own a job of Slurm
    # takes srun, which starts nothing outside of a job.
    if text != "auto":
        return chosen("--start", text, DIALECTS)[0]
    if importlib.util.find_spec("mpi4py") is None:
        return "torchrun"
    in_slurm = "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None
    return mpi_starter.mpi_here() or ("srun" if in_slurm else "torchrun")


def message_options(operations: Sequence[str]) -> tuple[Option, ...]:
    """Returns the options of a measurement of messages, which measures some operations."""
    usual = ",".join(operations)
    only = {"type": lambda text: chosen("--only", text, operations), "default": usual}
    dtypes = {"type": lambda text: chosen("--dtypes", text, TYPES), "default": "float32"}
    return (
        option("--only", "OPERATIONS", f"operations (default: {usual})", **only),
        option("--routes", "ROUTES", "as gloo,mpi:segmented:4MiB (default: all that are here)",
               type=_routes, default=""),
        option("--sizes", "SIZES", "bytes, as 16,1KiB..1MiB (default: 4..64MiB)",
               type=_sizes, default="4..64MiB"),
        option("--dtypes", "TYPES", "types of elements (default: float32)", **dtypes),
        option("--ranks", "RANKS", "numbers of ranks, as 2,4 (default: 2)",
               type=_ranks, default="2"),
        option("--start", "PROGRAM", "an MPI, srun or torchrun, which start ranks (default: auto)",
               type=_starter, default="auto"),
        option("--hosts", "HOSTS", "machines of the ranks (default: this one)",
               type=lambda text: [*filter(None, text.split(","))], default=""),
        option("--device", "DEVICE", "where tensors are (default: cpu); on cuda it was never run",
               choices=("cpu", "cuda"), default="cpu"),
        number("--rounds", "turns of each library in a cell", default=5),
        option("--seconds", "S", "of each library in a cell (default: 0.2)",
               type=_seconds, default=0.2),
        TIMEOUT,
        JSON,
    )  # fmt: skip


COMM = Parser(
    "bench",
    (
        "hires bench comm --only all_reduce,latency --sizes 16..1MiB --out results/comm",
        "hires bench comm --table tuned/table.json",
        "hires bench comm --broadcast --link 10Gbit --ranks 2,4",
    ),
    option("rows", "comm", "messages through every backend beside raw libraries"),
    *message_options(OPERATIONS),
    option("--table", "FILE", "tuning table of the way `table`", default=""),
    flag("--broadcast", "broadcasts along a chain, as they are and as codes, from 4 KiB on"),
    option(
        "--link",
        "RATE",
        "of links between stand-ins for machines, as 10Gbit (needs root)",
        type=_rate,
        default="",
    ),
    OUT,
)
PARSERS = {"comm": COMM}


def main(args: Namespace) -> int:
    """Becomes a benchmark; returns only after showing a config."""
    if args.rows in PARSERS:
        if "sizes" not in args:
            raise ConfigError(f"{args.rows} has options of its own; write it first")
        kind = "broadcast" if args.broadcast else "comm"
        others = args.table or args.dtypes != ["float32"] or [*args.only] != [*OPERATIONS]
        if args.broadcast and others:
            text = "--broadcast measures broadcasts of float32"
            raise ConfigError(f"{text}; leave --only, --dtypes and --table out")
        if args.link and args.hosts:
            raise ConfigError("--link makes hosts of its own; leave --hosts out")
        return exec_benchmark(message_task(args, kind, kind))
    task = composed_task(args)
    if args.cfg:  # of the first row
        return print_config(from_dict(task["rows"][0]["config"]), args.json)
    return exec_benchmark(task)


def message_task(args: Namespace, kind: str, name: str) -> dict[str, Any]:
    """Returns a measurement of messages as plain values; ConfigError: it cannot start so."""
    if args.hosts and not DIALECTS[args.start].hosts:
        raise ConfigError(f"--start {args.start} starts ranks on this machine alone; use an MPI")
    values = {key: value for key, value in vars(args).items() if key not in ("argv", "rows")}
    return {**values, "kind": kind, "name": name, "command": shlex.join(args.argv)}


def exec_benchmark(task: Mapping[str, Any]) -> int:
    """Becomes the process that measures a task."""
    sys.stdout.flush()
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(task, file)
    return os.execv(sys.executable, module_command("hires.bench.bench_main", file.name))


@dataclass
class FileRow(Section):
    """A row of a file of rows, as one writes it."""

    name: str
    keys: list[str] = value([])
    """Overrides, which come after those of the file and of the command line."""
    task: str | None = None
    """Left out if the composed task is another one."""
    each: dict[str, list[Any]] = value({})
    """Values of keys; every combination of them is a row."""
    needs: str | None = None
    """A package without which it is left out."""
    group: str = ""
    """Another name for ``--only``."""
    what: str = ""
    peer: str = "hires"
    """Or a library beside it, see ``hires/bench/peers``."""
    ranks: int = value(1, low=1)
    """Of a peer without a layout."""
    threads: int = value(1, low=1)
    baseline: str = ""
    """The row whose images per second are 1; unset: the first one."""
    beside: list[str] = value([])
    """Rows of others that do the same."""
    settings: dict[str, Any] = value({})
    """Of its peer."""
    checked: bool = True
    """Whether it must compute what one process computes."""
    half_image: bool = False
    choose: int | None = value(None, low=2)
    """If set, it stands for so many layouts that ``hires plan --choose`` lists."""

    def _problems(self) -> Iterator[str]:
        for key, values in self.each.items():
            if not isinstance(values, list):
                yield f"each.{key}={values!r} must be a list of values"


@dataclass
class RowFile(Section):
    """A file of rows."""

    rows: Any = None
    keys: list[str] = value([])
    """Overrides of all rows, before those of the command line."""
    every: dict[str, Any] = value({})
    """What all rows have that do not say otherwise."""
    notes: str = ""
    """Text above the tables of a README."""


FRONT = ("name", "keys", "task", "each", "needs", "group")
"""What of a row is read here; what runs it gets the rest."""


def composed_task(args: Namespace) -> dict[str, Any]:
    """Returns what is measured as plain values; ConfigError: a row cannot be composed."""
    data = file_of_rows(args.rows)
    rows = [*composed_rows(args, data)]
    if not rows:
        raise ConfigError(f"--only {args.only} names no row of {args.rows} for this task")
    check_titles(args.rows, rows)
    return {
        "kind": "rows",
        "name": Path(args.rows).stem,
        "command": shlex.join(args.argv),
        "notes": data.notes,
        "rows": rows,
        **{name: getattr(args, name) for name in ("rounds", "warmup", "timeout", "json")},
        "out": args.out and str(Path(args.out).absolute()),
    }


def file_of_rows(name: str) -> RowFile:
    """Returns a file of rows, one of hires or a path; ConfigError: one is wrong."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if name not in SUBVERBS:
            raise ConfigError(f"unknown benchmark {name!r}; {offer(name, SUBVERBS)}")
        path = Path(str(resources.files("hires.bench") / f"rows/{name}.yaml"))
    where = name
    try:
        data = build(RowFile, read_named_values(path))
        if not isinstance(data.rows, list) or not data.rows:
            raise ConfigError(f"rows={data.rows!r} must be a list of rows")
        for number, row in enumerate(data.rows, 1):
            where = f"{name}, row {number}"
            if not isinstance(row, dict) or not isinstance(row.get("name"), str):
                raise ConfigError(f"{row!r} must be keys with values, and its `name` must be text")
            where = f"{name}, row {row['name']!r}"
            build(FileRow, {**data.every, **row})
        data.rows = [{**data.every, **row} for row in data.rows]
        names = sorted(row["name"] for row in data.rows)
        for row in data.rows:
            where = f"{name}, row {row['name']!r}"
            for other in [row.get("baseline") or row["name"], *row.get("beside", [])]:
                if other not in names:
                    raise ConfigError(f"no row {other!r} is beside it; {offer(other, names)}")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}; see hires/bench/rows/layouts.yaml") from None
    return data


def check_titles(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuses rows of one table that have one name, or a baseline that is in another table."""
    places = Counter((row["title"], row["name"]) for row in rows)
    for row in rows:
        title, where = row["title"], f"{name}, row {row['name']!r}: "
        if places[title, row["name"]] > 1:
            raise ConfigError(f"{where}{title} has two of this name; give each its own")
        if row.get("baseline") and (title, row["baseline"]) not in places:
            raise ConfigError(
                f"{where}its baseline {row['baseline']!r} is not in {title}; give both the same "
                f"task, network, image and batch"
            )


def composed_rows(args: Namespace, data: RowFile) -> Iterator[dict[str, Any]]:
    """Yields the chosen rows and their baselines with their configs.

    Keys of the file come first, then those of the command line, then those of the row.
    """
    composer, words = Composer(args.config_dir), args.overrides
    wanted = rows_named(data.rows, args.only)
    for row in (row for row in data.rows if row["name"] in wanted):
        if row.get("needs") and importlib.util.find_spec(row["needs"]) is None:
            sys.stderr.write(f"hires: {row['name']} is left out: {row['needs']} is not installed\n")
            continue
        each = row.get("each", {})
        for values in itertools.product(*each.values()):
            more = [f"{key}={value}" for key, value in zip(each, values, strict=True)]
            keys = merged(data.keys, words, row.get("keys", []), more)
            try:
                config = config_of(composer.composed(keys)[0], words)
            except ConfigError as error:
                raise ConfigError(f"{args.rows}, row {row['name']!r}: {error}") from None
            if row.get("task", config.task.name) != config.task.name:
                continue
            title = f"{config.task.name}: {config.model.name}, {config.height}x{config.width}, "
            title += f"batch {config.batch}, device={config.device}"
            if "choose" in row:
                title = f"{row['name']} {' '.join(more)}"
            kept = {name: row[name] for name in row if name not in FRONT}
            first = {"name": row["name"], "title": title, "words": keys}
            yield {**first, **kept, "config": to_dict(resolve_data(config))}


def rows_named(rows: Sequence[Mapping[str, Any]], only: str) -> set[str]:
    """Returns the names of the rows that patterns name, by row or group, and of their baselines."""
    patterns = [pattern.strip() for pattern in only.split(",")]
    fits = [
        row
        for row in rows
        if any(fnmatch.fnmatch(row.get(key, ""), p) for key in ("name", "group") for p in patterns)
    ]
    baselines = {row["baseline"] for row in fits if "baseline" in row}
    first = {rows[0]["name"]} if fits and "choose" not in rows[0] else set()
    return {row["name"] for row in fits} | baselines | first


def merged(*groups: Sequence[str]) -> list[str]:
    """Returns overrides of which a later one of the same key takes the place of the earlier."""
    by_key: dict[str, str] = {}
    for word in itertools.chain(*groups):
        by_key[key_in(word)] = word
    return [*by_key.values()]
