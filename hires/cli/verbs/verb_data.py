"""``hires data``: make a folder of labelled images, or check images before a run."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hires.cli.options import CONFIG_DIR, JSON, Parser, flag, number, option
from hires.cli.screen import (
    plural,
    print_activity,
    print_json,
    print_lines,
    print_result,
    print_table,
    table_lines,
)
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.report.columns import Column

if TYPE_CHECKING:  # the decoders are imported when they are used
    from hires.data.data_check import DataReport

SUBVERBS = ("make", "check")
_MOST_FILES = 5  # that a finding names
_MOST_CLASSES = 30
_COUNTED = {"folder": "images", "cifar10": "images", "masks": "in images"}
_COUNTED |= {"images": "images", "slide": "patches"}
"""``data`` with classes -> what is counted of each."""


def _size(text: str) -> list[int]:
    match = re.fullmatch(r"(\d+)(?:[x,](\d+))?", text.strip("[]"))
    if match is None or "0" in (match[1], match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write HEIGHTxWIDTH, as 256x320")
    return [int(match[1]), int(match[2] or match[1])]


PARSER = Parser(
    "data",
    (
        "hires data make data/textures --classes 4 --count 64 --size 256x320",
        "hires data make data/shapes --masks --classes 3 --size 64x64",
        "hires data make data/slides --slides --classes 2 --count 6 --size 768x1024",
        "hires data check data/textures",
        "hires data check data/textures image=256 model.channels=1   as this run would read them",
        "hires data check photos data=pairs model=edsr image=96",
        "hires data check shapes data=masks data.classes=3 data.ignore=255",
        "hires data check imagenette data=imagenette",
        "hires run data=folder data.path=data/textures image=256",
    ),
    option("action", "ACTION", "make or check", choices=SUBVERBS),
    option("path", "PATH", "the folder"),
    option("overrides", "KEY=VALUE", "check: keys of the run", nargs="*"),
    number("--classes", "make: classes", default=4),
    number("--count", "make: images, at least one a class (default: 64; slides: 6)"),
    number("--seed", "make: seed of the images", default=0, least=0),
    option("--size", "HxW", "make: pixels (default: 256x256; slides: 768x1024)", type=_size),
    flag("--masks", "make: images with a label map each, for data=masks"),
    flag("--slides", "make: slides of tissue on glass, with outlines, for data=slide"),
    flag("--striped", "make: write ordinary TIFF instead of tiled TIFF"),
    CONFIG_DIR,
    JSON,
    more="make writes TIFF files, one sub-folder a class, whose class a network can learn. The\n"
    "same numbers give the same files; a folder that is complete is left as it is.\n\n"
    "check decodes every file as a run would, and says what a run would refuse (exit code 1),\n"
    "change or ignore.",
)


def main(args: argparse.Namespace) -> int:
    """Writes or checks a folder of images; returns 0, or 1 if a run could not read all of it."""
    if args.action == "check":
        return _check(args)
    from hires.data.make_data import make_data

    if args.overrides:
        raise ConfigError(f"{args.overrides[0]} is a key, which hires data make does not take")
    # A slide has more than one patch only if it is larger than an image.
    args.count = args.count or (6 if args.slides else 64)
    args.size = args.size or ([768, 1024] if args.slides else [256, 256])
    if args.count < args.classes:
        raise ConfigError(f"--count {args.count} must be at least {args.classes}, one a class")
    path = Path(args.path).expanduser()
    facts = {key: getattr(args, key) for key in ("classes", "count", "size", "seed")}
    if args.masks and not 2 <= args.classes <= 256:
        raise ConfigError(f"--classes {args.classes} must be 2 to 256 with --masks")
    if args.masks and args.slides:
        raise ConfigError("--masks and --slides are two kinds of data; give one of them")
    kind = "slides" if args.slides else "masks" if args.masks else "textures"
    written = make_data(kind, path, **facts, tiled=not args.striped)
    state = f"{written} written now" if written else "there already"
    size = " x ".join(map(str, args.size))
    text = f"{path}: {args.count} images of {size} in {args.classes} classes, {state}"
    print_result(args.json, {"path": str(path), **facts, "written": written}, text)
    return 0


def _check(args: argparse.Namespace) -> int:
    from hires.data.data_check import check_data
    from hires.data.source import SOURCES

    config, path, words = RunConfig(), args.path, args.overrides
    if "=" in path and not Path(path).exists():  # the words of a run, with data.path
        path, words = None, [path, *words]
    if words:
        from hires.cli.compose_config import compose

        config = compose(["data=folder", *words], args.config_dir)
    path, keys = path or config.data.path, [word.partition("=")[0] for word in words]
    if path is None:
        raise ConfigError("hires data check needs a PATH, or data.path=PATH")
    data = config.data.name if "data" in keys else None
    kinds = [name for name in SOURCES if SOURCES[name].reads_files]
    if data not in (None, *kinds):
        raise ConfigError(f"data={data} has no files to check; use data={', '.join(kinds)}")

    def progress(done: int, total: int) -> None:
        if done % 16 == 0:
            print_activity(f"decoded {done} of {total} files ...")

    report = check_data(path, config, data, "image" in keys, progress)
    print_activity("")
    if args.json:
        facts = {name: getattr(report, name) for name in ("path", "data", "ok", "classes")}
        findings = [dataclasses.asdict(finding) for finding in report.findings]
        print_json({**facts, "kinds": report.kinds(), "findings": findings})
    else:
        _print(report)
    return 0 if report.ok else RunError.exit_code


def _print(report: DataReport) -> None:
    total = len(report.images)
    print(f"{report.path}: {plural(total, 'file')}, read as data={report.data}\n")
    classes = [[name, str(count)] for name, count in report.classes.items()]
    if report.data in _COUNTED and classes and [*report.classes] != ["images"]:
        what = _COUNTED[report.data]
        heads: list[Column | str] = ["class", Column("images", what, digits=0)]
        print_table("Classes", heads, classes[:_MOST_CLASSES])
        if len(classes) > _MOST_CLASSES:
            print(f"and {len(classes) - _MOST_CLASSES} more classes; --json lists all\n")
    names = ("format", "colours", "bits", "images", "sizes", "smallest", "largest")
    units = {"smallest": "height x width", "largest": "height x width"}
    counted = {name: {"digits": 0} for name in ("bits", "images", "sizes")}
    kinds = [Column(name, name, units.get(name, ""), **counted.get(name, {})) for name in names]
    rows = [[_cell(row[name]) for name in names] for row in report.kinds()]
    if rows:
        print_table("Images", kinds, rows)
    findings: list[tuple[str, str, str]] = []
    for one in report.findings:
        more = len(one.files) - _MOST_FILES
        below = [*one.files[:_MOST_FILES], *([f"and {more} more; --json lists all"] * (more > 0))]
        findings.append((one.severity, str(len(one.files) or ""), one.text))
        findings += [("", "", f"  {line}") for line in below]
    if findings:
        found = table_lines(findings, "lrl", heads=False, names=("state", "files", "finding"))
        print_lines(["Findings", "", *found, ""])
    print("a run can read all of it" if report.ok else "a run would end at the errors")


def _cell(value: object) -> str:
    return " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)
