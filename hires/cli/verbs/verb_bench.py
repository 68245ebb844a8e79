"""``hires bench``: measure layouts beside torch's own, messages through every library, and more.

The rows are composed here; what runs them needs torch, so this process becomes
``python -m hires.bench.bench_main``, signals and all. Messages have options of their own.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import itertools
import json
import os
import shlex
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from hires.cli.compose.compose_config import Composer, config_of
from hires.cli.compose.overrides import key_in
from hires.cli.data_keys import with_classes
from hires.cli.options import JSON, Option, Parser, composing, number, option
from hires.core.config.run_config import to_dict
from hires.core.errors import ConfigError
from hires.core.python_command import module_command
from hires.core.registry import offer
from hires.core.store.reading import read_named_values

BENCHMARKS = {
    "layouts": "tiles, pipelines and replicas beside one process and torch's own",
    "precision": "inference in fp32, bf16 and int8 beside torch, ONNX Runtime and OpenVINO",
    "choose": "layouts that hires plan --choose lists, predicted beside measured",
    "comm": "messages through every backend beside raw libraries (hires bench comm --help)",
}
FIELDS = {
    *("what", "peer", "ranks", "threads", "baseline", "beside", "settings", "checked", "choose"),
    *("half_image", "group"),
}
"""Of a row, besides ``name``, ``keys``, ``task``, ``each`` and ``needs``."""
OUT = option("--out", "FOLDER", "keep README.md and JSON there, after each round", default="")
TIMEOUT = number("--timeout", "seconds for each start of ranks", default=3600)
PARSER = Parser(
    "bench",
    (
        "hires bench layouts model=resnet101 image=512 --out results/layouts",
        "hires bench precision model=unet image=256 batch=8 --only 'fp32,hires*'",
        "hires bench comm --only all_reduce,latency --sizes 16..1MiB",
    ),
    option("rows", "ROWS", f"{', '.join(BENCHMARKS)}, or a YAML file of rows"),
    *composing(),
    option("--only", "NAMES", "groups or names of rows, with * and commas", default="*"),
    number("--rounds", "samples of every row", default=15),
    number("--warmup", "rounds before them", default=1, least=0),
    TIMEOUT,
    OUT,
    JSON,
    more="benchmarks:\n" + "\n".join(f"  {name:<10}{what}" for name, what in BENCHMARKS.items()),
)
TUNED = (
    "latency,all_reduce,reduce,broadcast,all_gather_into_tensor,reduce_scatter_tensor,"
    "all_to_all_single,gather,scatter,barrier"
)
"""Operations of which a tuning table has rules."""


def message_options(operations: str) -> tuple[Option, ...]:
    """Returns the options of a measurement of messages, which measures some operations."""
    words = {
        "--only": (operations, "operations"),
        "--routes": ("", "routes, as gloo,mpi:segmented:4MiB; unset: all that are here"),
        "--sizes": ("4..64MiB", "bytes, as 16,1KiB..1MiB"),
        "--dtypes": ("float32", "types of elements"),
        "--ranks": ("2", "numbers of ranks, as 2,4"),
        "--start": ("auto", "what starts the ranks: an MPI, srun or torchrun"),
        "--hosts": ("", "machines of the ranks; unset: this one"),
        "--device": ("cpu", "where the tensors are: cpu or cuda (on GPUs it was never run)"),
    }
    texts = [
        option(name, name.strip("-").upper(), f"{what} (default: {default or 'none'})",
               default=default)
        for name, (default, what) in words.items()
    ]  # fmt: skip
    return (
        *texts,
        number("--rounds", "turns of each library in a cell", default=5),
        option(
            "--seconds", "S", "of each library in a cell (default: 0.2)", type=float, default=0.2
        ),
        TIMEOUT,
        JSON,
    )


COMM = Parser(
    "bench",
    (
        "hires bench comm --only all_reduce,latency --sizes 16..1MiB --out results/comm",
        "hires bench comm --table tuned/table.json",
    ),
    option("rows", "comm", "messages through every backend beside raw libraries"),
    *message_options(f"bandwidth,bidirectional,{TUNED}"),
    option("--table", "FILE", "tuning table of the way `table`", default=""),
    OUT,
)


def main(words: Sequence[str]) -> int:
    """Becomes a benchmark; returns only after showing help."""
    if words[:1] == ["comm"]:
        if {"--help", "-h"} & {*words}:
            COMM.print_help()
            return 0
        return become(message_task(COMM.read(words), "comm", "comm"))
    if not words or {"--help", "-h"} & {*words}:
        PARSER.print_help()
        return 0
    return become(composed_task(PARSER.read(words)))


def message_task(args: Namespace, kind: str, name: str) -> dict[str, Any]:
    """Returns a measurement of messages as plain values."""
    values = {key: value for key, value in vars(args).items() if key not in ("argv", "rows")}
    return {**values, "kind": kind, "name": name, "command": shlex.join(args.argv)}


def become(task: Mapping[str, Any]) -> int:
    """Becomes the process that measures a task."""
    sys.stdout.flush()
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(task, file)
    return os.execv(sys.executable, module_command("hires.bench.bench_main", file.name))


def composed_task(args: Namespace) -> dict[str, Any]:
    """Returns what is measured as plain values; ConfigError: a row cannot be composed."""
    data = file_of_rows(args.rows)
    rows = [*composed_rows(data, args.overrides, args.only, args.config_dir)]
    if not rows:
        raise ConfigError(f"--only {args.only} names no row of {args.rows} for this task")
    return {
        "kind": "rows",
        "name": Path(args.rows).stem,
        "command": shlex.join(args.argv),
        "notes": data.get("notes", ""),
        "rows": rows,
        **{name: getattr(args, name) for name in ("rounds", "warmup", "timeout", "json")},
        "out": args.out and str(Path(args.out).absolute()),
    }


def file_of_rows(name: str) -> dict[str, Any]:
    """Returns a file of rows, one of hires or a path; ConfigError: it is none."""
    if not name.endswith((".yaml", ".yml")):
        if name not in BENCHMARKS:
            raise ConfigError(f"unknown benchmark {name!r}; {offer(name, BENCHMARKS)}")
        with resources.as_file(resources.files("hires.bench") / f"rows/{name}.yaml") as path:
            return dict(read_named_values(path))
    data = dict(read_named_values(name))
    if not isinstance(data.get("rows"), list) or not all("name" in row for row in data["rows"]):
        raise ConfigError(f"{name} has no `rows` with a `name`; see hires/bench/rows/layouts.yaml")
    return data


def composed_rows(
    data: Mapping[str, Any], words: Sequence[str], only: str, config_dir: str | None
) -> Iterator[dict[str, Any]]:
    """Yields the chosen rows and their baselines with their configs.

    Keys of the file come first, then those of the command line, then those of the row.
    """
    composer, usual = Composer(config_dir), data.get("keys", [])
    rows = [{**data.get("every", {}), **row} for row in data["rows"]]
    for row in rows:
        if unknown := row.keys() - {*FIELDS, "name", "keys", "task", "each", "needs"}:
            raise ConfigError(
                f"row {row['name']!r} has unknown fields {', '.join(sorted(unknown))}"
            )
    wanted = chosen(rows, only)
    for row in (row for row in rows if row["name"] in wanted):
        if row.get("needs") and importlib.util.find_spec(row["needs"]) is None:
            sys.stderr.write(f"hires: {row['name']} is left out: {row['needs']} is not installed\n")
            continue
        each = row.get("each", {})
        for values in itertools.product(*each.values()):
            more = [f"{key}={value}" for key, value in zip(each, values, strict=True)]
            keys = merged(usual, words, row.get("keys", []), more)
            config = config_of(composer.composed(keys)[0], words)
            if row.get("task", config.task.name) != config.task.name:
                continue
            title = f"{config.task.name}: {config.model.name}, {config.height}x{config.width}, "
            title += f"batch {config.batch}, device={config.device}"
            if "choose" in row:
                title = f"{row['name']} {' '.join(more)}"
            kept = {name: row[name] for name in FIELDS if name in row and name != "group"}
            first = {"name": row["name"], "title": title, "words": keys}
            yield {**first, **kept, "config": to_dict(with_classes(config))}


def chosen(rows: Sequence[Mapping[str, Any]], only: str) -> set[str]:
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
