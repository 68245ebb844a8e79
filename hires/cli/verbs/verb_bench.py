"""``hires bench ROWS``: measures rows of a file in turns, each beside its baseline.

The rows are composed here; what runs them needs torch, so this process becomes
``python -m hires.bench.bench_main``, signals and all. Messages have a benchmark of their own.
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
from hires.cli.data_keys import with_classes
from hires.cli.options import JSON, Parser, composing, number, option
from hires.core.config.run_config import to_dict
from hires.core.errors import ConfigError
from hires.core.python_command import module_command
from hires.core.registry import offer
from hires.core.store.reading import read_named_values

BENCHMARKS = {
    "layouts": "tiles, pipelines and replicas beside one process and torch's own",
    "precision": "inference in fp32, bf16 and int8 beside torch, ONNX Runtime and OpenVINO",
    "choose": "layouts that hires plan --choose lists, predicted beside measured",
    "comm": "messages through every backend beside raw libraries; it has options of its own",
}
FIELDS = {
    *("what", "peer", "ranks", "threads", "baseline", "beside", "settings", "checked", "choose"),
    *("half_image", "group"),
}
"""Of a row, besides ``name``, ``keys``, ``task``, ``each`` and ``needs``."""
PARSER = Parser(
    "bench",
    (
        "hires bench layouts model=resnet101 image=512 --out results/layouts",
        "hires bench precision model=unet image=256 batch=8 --only 'fp32,hires*'",
        "hires bench comm --help",
    ),
    option("rows", "ROWS", f"{', '.join(BENCHMARKS)}, or a YAML file of rows", BENCHMARKS),
    *composing(),
    option("--only", "NAMES", "groups or names of rows, with * and commas", default="*"),
    number("--rounds", "samples of every row", default=15),
    number("--warmup", "rounds before them", default=1, least=0),
    number("--timeout", "seconds for each start of ranks", default=3600),
    option("--out", "FOLDER", "keep README.md and JSON there, after each round", default=""),
    JSON,
    more="benchmarks:\n" + "\n".join(f"  {name:<10}{what}" for name, what in BENCHMARKS.items()),
)


def main(words: Sequence[str]) -> int:
    """Becomes a benchmark; returns only after showing help."""
    if not words or words[0] in ("--help", "-h"):
        PARSER.print_help()
        return 0
    if words[0] == "comm":
        return become("hires.bench.comm_bench", "bench", *words[1:])
    args = PARSER.read(words)
    task = composed_task(args)
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(task, file)
    return become("hires.bench.bench_main", file.name)


def become(module: str, *words: str) -> int:
    """Becomes a Python module."""
    sys.stdout.flush()
    return os.execv(sys.executable, module_command(module, *words))


def composed_task(args: Namespace) -> dict[str, Any]:
    """Returns what is measured as plain values; ConfigError: a row cannot be composed."""
    data = file_of_rows(args.rows)
    rows = [*composed_rows(data, args.overrides, args.only, args.config_dir)]
    if not rows:
        raise ConfigError(f"--only {args.only} names no row of {args.rows} for this task")
    return {
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
        by_key[word.lstrip("+").partition("=")[0]] = word
    return [*by_key.values()]
