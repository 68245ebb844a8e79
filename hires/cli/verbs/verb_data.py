"""``hires data make``: where do images for a first try come from?"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from hires.cli.compose.nearest import offer
from hires.cli.options import Parser, add_json
from hires.core.errors import ConfigError

_EXAMPLES = (
    "hires data make data/textures --classes 4 --count 64 --size 256x320",
    "hires run data=folder data.path=data/textures image=256",
)


def main(words: Sequence[str]) -> int:
    """Writes a folder of labelled images; returns 0."""
    if words and words[0] != "make" and not words[0].startswith("-"):
        raise ConfigError(f"unknown verb 'data {words[0]}'; {offer(words[0], ['make'])}")
    args = _parser().read(words[1:] if words[:1] == ["make"] else [*words, "--help"])
    return _make(args)


def _parser() -> Parser:
    """Returns the parser of ``hires data make``."""
    text = (
        "Write a folder of TIFF images, one sub-folder a class, whose class a network can learn.\n"
        "The same numbers give the same files; a folder that is complete is left as it is."
    )
    parser = Parser("data make", text, _EXAMPLES)
    parser.add_argument("path", type=Path, metavar="PATH", help="the folder to write")
    parser.add_argument("--classes", type=int, default=4, metavar="N", help="classes (default 4)")
    parser.add_argument("--count", type=int, default=64, metavar="N", help="images (default 64)")
    parser.add_argument(
        "--size", type=_size, default=[256, 256], metavar="HxW", help="pixels (default 256x256)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument(
        "--striped", action="store_true", help="write ordinary TIFF instead of tiled TIFF"
    )
    add_json(parser)
    return parser


def _make(args: argparse.Namespace) -> int:
    """Writes the folder and says what it did."""
    from hires.data.textures import make_folder

    for name, low in (("classes", 1), ("count", args.classes), ("seed", 0)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least {low}")
    path = args.path.expanduser()
    made = make_folder(path, args.classes, args.count, args.size, args.seed, tiled=not args.striped)
    height, width = args.size
    state = f"{made.num_written} written now" if made.num_written else "there already"
    facts = {"path": str(path), "classes": args.classes, "count": args.count, "size": args.size}
    if args.json:
        print(json.dumps(facts | {"seed": args.seed, "written": made.num_written}, indent=2))
    else:
        print(
            f"{path}: {args.count} images of {height} x {width} in {args.classes} classes, {state}"
        )
    return 0


def _size(text: str) -> list[int]:
    """Returns [height, width] of ``256x320`` or ``256``."""
    match = re.fullmatch(r"(\d+)(?:[x,](\d+))?", text.strip("[]"))
    if match is None or "0" in (match[1], match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write HEIGHTxWIDTH, as 256x320")
    return [int(match[1]), int(match[2] or match[1])]
