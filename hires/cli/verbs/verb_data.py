"""``hires data make``: makes images for a first try."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from hires.cli.options import JSON, Parser, flag, option
from hires.core.errors import ConfigError
from hires.core.registry import offer


def _size(text: str) -> list[int]:
    """Returns [height, width] of ``256x320`` or ``256``."""
    match = re.fullmatch(r"(\d+)(?:[x,](\d+))?", text.strip("[]"))
    if match is None or "0" in (match[1], match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write HEIGHTxWIDTH, as 256x320")
    return [int(match[1]), int(match[2] or match[1])]


PARSER = Parser(
    "data",
    "Write a folder of TIFF images, one sub-folder a class, whose class a network can learn.\n"
    "The same numbers give the same files; a folder that is complete is left as it is.",
    (
        "hires data make data/textures --classes 4 --count 64 --size 256x320",
        "hires run data=folder data.path=data/textures image=256",
    ),
    option("action", metavar="make", complete=["make"], help="the only action"),
    option("path", type=Path, metavar="PATH", help="the folder to write"),
    *(
        option(name, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
        for name, default, what in (
            ("--classes", 4, "classes"),
            ("--count", 64, "images"),
            ("--seed", 0, "seed of the images"),
        )
    ),
    option(
        "--size", type=_size, default=[256, 256], metavar="HxW", help="pixels (default: 256x256)"
    ),
    flag("--striped", help="write ordinary TIFF instead of tiled TIFF"),
    JSON,
)


def main(words: Sequence[str]) -> int:
    """Writes a folder of labelled images; returns 0."""
    from hires.data.textures import make_folder

    if words and words[0] != "make" and not words[0].startswith("-"):
        raise ConfigError(f"unknown verb 'data {words[0]}'; {offer(words[0], ['make'])}")
    args = PARSER.read(words or ["--help"])
    for name, low in (("classes", 1), ("count", args.classes), ("seed", 0)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least {low}")
    path = args.path.expanduser()
    tiled = not args.striped
    written = make_folder(path, args.classes, args.count, args.size, args.seed, tiled)
    if args.json:
        facts = {key: getattr(args, key) for key in ("classes", "count", "size", "seed")}
        print(json.dumps({"path": str(path), **facts, "written": written}, indent=2))
        return 0
    state = f"{written} written now" if written else "there already"
    size = " x ".join(map(str, args.size))
    print(f"{path}: {args.count} images of {size} in {args.classes} classes, {state}")
    return 0
