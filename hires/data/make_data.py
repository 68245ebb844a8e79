"""Writes images for a first try: ``hires data make``. The same arguments give the same bytes.

    textures   texture0/00000.tif ...   images in tiles (or strips), one sub-folder a class
    masks      images/ and masks/       bright shapes on a rough ground, a class a pixel
    slides     slides/000.tif ...       tissue on glass, three levels in tiles
               annotations/, labels.csv outlines of the tissue with its class, and a table

A folder is filled under a hidden name: it is there as a whole, with its manifest, or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from tifffile import TiffWriter

from hires.core.errors import ConfigError, RunError
from hires.core.store import files
from hires.core.store.reading import read_json
from hires.data.image_format import Size, Span
from hires.data.sources import synthetic
from hires.data.sources.folder import MANIFEST

_SHAPES = 5
"""Of an image with a label map."""
_BLOBS, _CORNERS = 3, 24
"""Of tissue on a slide."""
_GLASS = (243, 242, 244)
_LEVELS, _SLIDE_TILE = 3, 256
_HUES = np.array([0.0, 2.1, 4.2])
"""Angles of red, green and blue on the circle of colours."""
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class MadeData:
    """All that determines the bytes of a folder: the content of its manifest."""

    kind: str
    classes: int
    count: int
    """Images of all classes together; the classes take turns."""
    size: list[int]
    """[height, width]"""
    seed: int
    tile: int
    """Side of a TIFF tile of textures, a multiple of 16; 0: strips."""

    def file(self, index: int) -> Path:
        """Returns where an image lies in the folder."""
        digits = max(3 if self.kind == "slides" else 5, len(str(self.count - 1)))
        number = f"{index:0{digits}d}"
        if self.kind == "masks":
            return Path("images", f"{number}.png")
        folder = synthetic.class_name(index % self.classes, self.classes)
        return Path(folder if self.kind == "textures" else "slides", f"{number}.tif")


def make_data(
    kind: str,
    path: str | Path,
    classes: int,
    count: int,
    size: Sequence[int],
    seed: int,
    tiled: bool = True,
) -> int:
    """Writes ``count`` images of a kind of :data:`WRITERS`; returns how many, 0 if all are there.

    The folder is new or empty, or one that this function wrote with the same arguments. ``size`` is
    [height, width]; of ``tiled`` textures ranks read their window only.

    Raises:
        ConfigError: the folder holds something else.
        RunError: the folder cannot be written.
    """
    tile = min(256, 16 * -(-max(size) // 16)) if tiled and kind == "textures" else 0
    made = MadeData(kind, classes, count, [*size], seed, tile)
    root = Path(path).expanduser().resolve()
    try:
        if _is_complete(root, asdict(made)):
            return 0
        root.parent.mkdir(parents=True, exist_ok=True)
        files.remove_leftovers(root.parent)
        hidden = files.hidden(root)
        try:
            for index in range(count):
                (hidden / made.file(index)).parent.mkdir(parents=True, exist_ok=True)
                WRITERS[kind](hidden, made, index)
            (hidden / MANIFEST).write_text(json.dumps(asdict(made), indent=2) + "\n")
            hidden.rename(root)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    except OSError as error:
        raise RunError(f"cannot write images to {root}: {error.strerror or error}") from error
    return count


def _is_complete(root: Path, wanted: dict[str, Any]) -> bool:
    """Whether a folder holds these images; ConfigError: it holds anything else."""
    if not root.is_dir():
        if root.exists():
            raise ConfigError(f"{root} is a file; give the name of a new folder")
        return False
    note = root / MANIFEST
    if not note.exists():
        if any(root.iterdir()):
            raise ConfigError(
                f"{root} holds files that hires did not write; choose a new or an empty folder"
            )
        return False
    stored = read_json(note, [])  # of a damaged one nothing
    differing = [f"{k}={stored.get(k)}, not {v}" for k, v in wanted.items() if stored.get(k) != v]
    if differing:
        raise ConfigError(
            f"{root} holds images made with {' and '.join(differing)}; choose another folder, or "
            f"remove this one first"
        )
    return True


def _write_texture(root: Path, made: MadeData, index: int) -> None:
    # Noise does not compress: zlib need not try hard.
    kind: dict[str, Any] = {
        "photometric": "rgb", "compression": "zlib", "compressionargs": {"level": 1},
    }  # fmt: skip
    height, width = made.size
    path = root / made.file(index)
    if made.tile:
        kind |= {"tile": (made.tile,) * 2, "shape": (height, width, 3), "dtype": np.uint8}
        tifffile.imwrite(path, _tiles(made, index), **kind, metadata=None)
    else:
        tifffile.imwrite(path, _texture(made, index, (0, height)), **kind, metadata=None)


def _tiles(made: MadeData, index: int) -> Iterator[Pixels]:
    """Yields the tiles of an image, (tile, tile, 3); one row of them at a time is in memory."""
    (height, width), side = made.size, made.tile
    for top in range(0, height, side):
        band = _texture(made, index, (top, min(top + side, height)))
        for left in range(0, width, side):
            part = band[:, left : left + side]
            tile = np.zeros((side, side, 3), np.uint8)
            tile[: part.shape[0], : part.shape[1]] = part
            yield tile


def _texture(made: MadeData, index: int, rows: Span) -> Pixels:
    """Returns some rows of an image as 8-bit pixels, (h, W, 3)."""
    height, width = made.size
    label, window = index % made.classes, ((height, width), rows, (0, width))
    drawn = synthetic.draw(label, 3, *window, seed=made.seed, index=index)
    pixels = np.rint(drawn * np.float32(255)).clip(0, 255).astype(np.uint8)
    return np.ascontiguousarray(pixels.transpose(1, 2, 0))


def _write_mask(root: Path, made: MadeData, index: int) -> None:
    random = np.random.Generator(np.random.PCG64([made.seed, index]))
    height, width = made.size
    rows, cols = np.mgrid[:height, :width]
    labels = np.zeros((height, width), np.uint8)
    for _ in range(_SHAPES):
        label = int(random.integers(1, made.classes))
        radius = max(2.0, min(made.size) * float(random.uniform(0.08, 0.2)))
        away = rows - random.uniform(0, height), cols - random.uniform(0, width)
        disc = away[0] ** 2 + away[1] ** 2 < radius**2
        square = np.maximum(*map(np.abs, away)) < radius
        labels[disc if label % 2 else square] = label
    angles = 2 * np.pi * np.arange(made.classes)[:, None] / max(1, made.classes - 1)
    colours = 0.5 + 0.3 * np.cos(angles + _HUES)
    colours[0] = 0.35
    noisy = colours[labels] + random.normal(0, 0.12, (height, width, 3))
    image = root / made.file(index)
    (root / "masks").mkdir(exist_ok=True)
    Image.fromarray(labels).save(root / "masks" / image.name)
    Image.fromarray((255 * noisy).clip(0, 255).astype(np.uint8)).save(image)


def _write_slide(root: Path, made: MadeData, index: int) -> None:
    label, path = f"class{index % made.classes}", root / made.file(index)
    pixels, outlines = _slide(made, index)
    (root / "annotations").mkdir(exist_ok=True)
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [[*outline, outline[0]]]},
            "properties": {"objectType": "annotation", "classification": {"name": label}},
        }
        for outline in outlines
    ]
    text = json.dumps({"type": "FeatureCollection", "features": features})
    (root / "annotations" / f"{path.stem}.geojson").write_text(text)
    names = [made.file(number).name for number in range(made.count)]
    lines = [f"{name},class{number % made.classes}\n" for number, name in enumerate(names)]
    (root / "labels.csv").write_text("".join(["slide,label\n", *lines]))
    options: dict[str, Any] = {
        "tile": (_SLIDE_TILE,) * 2, "photometric": "rgb", "compression": "zlib", "metadata": None,
    }  # fmt: skip
    with TiffWriter(path) as file:
        file.write(pixels, subifds=_LEVELS - 1, **options)
        for _ in range(_LEVELS - 1):  # each level is half as large, below the finest one
            height, width = (length // 2 * 2 for length in pixels.shape[:2])
            quads = pixels[:height, :width].reshape(height // 2, 2, width // 2, 2, 3)
            pixels = ((quads.sum((1, 3), dtype=np.uint16) + 2) // 4).astype(np.uint8)
            file.write(pixels, subfiletype=1, **options)


def _slide(made: MadeData, index: int) -> tuple[Pixels, list[list[tuple[float, float]]]]:
    """Returns a slide, (H, W, 3), and the outlines of its tissue, (column, row)."""
    random = np.random.Generator(np.random.PCG64([made.seed, 0x51, index]))
    height, width = made.size
    drawn, outlines = Image.new("1", (width, height)), []
    for _ in range(_BLOBS):
        middle = random.uniform(0.25, 0.75, 2) * [width, height]
        radius = min(made.size) * random.uniform(0.15, 0.28) * random.uniform(0.8, 1.2, _CORNERS)
        turn = np.arange(_CORNERS) / _CORNERS * 2 * np.pi
        corners = np.stack([np.cos(turn), np.sin(turn)], 1) * radius[:, None] + middle
        outlines.append([(float(x), float(y)) for x, y in corners.clip(0, [width, height])])
        ImageDraw.Draw(drawn).polygon(outlines[-1], fill=1)
    tissue = 170 + 55 * np.cos(2 * np.pi * (index % made.classes) / max(2, made.classes) + _HUES)
    inside, pixels = np.asarray(drawn)[:, :, None], np.empty((height, width, 3), np.uint8)
    for top in range(0, height, _SLIDE_TILE):  # numbers take 32 times the room of the pixels
        rows = slice(top, min(top + _SLIDE_TILE, height))
        shape: Size = (rows.stop - top, width)
        rough = random.normal(0, 14, (*shape, 1)) + random.normal(0, 5, (*shape, 3))
        band = np.where(inside[rows], tissue + rough, np.array(_GLASS) + rough / 8)
        pixels[rows] = band.clip(0, 255).astype(np.uint8)
    return pixels, outlines


WRITERS: dict[str, Callable[[Path, MadeData, int], None]] = {
    "textures": _write_texture, "masks": _write_mask, "slides": _write_slide,
}  # fmt: skip
