"""``hires data make``: makes images for a first try."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from hires.cli.options import JSON, Parser, flag, number, option
from hires.core.errors import ConfigError
from hires.core.registry import offer


def _action(text: str) -> str:
    if text != "make":
        raise ConfigError(f"unknown verb 'data {text}'; {offer(text, ['make'])}")
    return text


def _size(text: str) -> list[int]:
    match = re.fullmatch(r"(\d+)(?:[x,](\d+))?", text.strip("[]"))
    if match is None or "0" in (match[1], match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write HEIGHTxWIDTH, as 256x320")
    return [int(match[1]), int(match[2] or match[1])]


PARSER = Parser(
    "data",
    (
        "hires data make data/textures --classes 4 --count 64 --size 256x320",
        "hires run data=folder data.path=data/textures image=256",
    ),
    option("action", "make", "the only action", ["make"], type=_action),
    option("path", "PATH", "the folder to write", type=Path),
    number("--classes", "classes", default=4),
    number("--count", "images, at least one a class", default=64),
    number("--seed", "seed of the images", default=0, least=0),
    option("--size", "HxW", "pixels (default: 256x256)", type=_size, default=[256, 256]),
    flag("--striped", "write ordinary TIFF instead of tiled TIFF"),
    JSON,
    more="The images are TIFF files, one sub-folder a class, whose class a network can learn. The\n"
    "same numbers give the same files; a folder that is complete is left as it is.",
)


def main(args: argparse.Namespace) -> int:
    """Writes a folder of labelled images; returns 0."""
    from hires.data.textures import make_folder

    if args.count < args.classes:
        raise ConfigError(f"--count {args.count} must be at least {args.classes}, one a class")
    path = args.path.expanduser()
    facts = {key: getattr(args, key) for key in ("classes", "count", "size", "seed")}
    written = make_folder(path, **facts, tiled=not args.striped)
    if args.json:
        print(json.dumps({"path": str(path), **facts, "written": written}, indent=2))
        return 0
    state = f"{written} written now" if written else "there already"
    size = " x ".join(map(str, args.size))
    print(f"{path}: {args.count} images of {size} in {args.classes} classes, {state}")
    return 0
