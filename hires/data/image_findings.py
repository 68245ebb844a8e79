"""Judges what decoded images have in common, and what a run does to those that differ."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence

from hires.core.config.run_config import RunConfig
from hires.data.checked_image import ERROR, NOTE, WARNING, CheckedImage, DataFinding
from hires.data.image_format import ImageFacts
from hires.data.start_check import FAR

Images = Sequence[CheckedImage]


def unreadable(images: Images) -> Iterator[DataFinding]:
    """Yields the files that would end a run."""
    files = [f"{image.path}: {image.reason}" for image in images if image.reason]
    if files:
        text = "unreadable, which would end a run; replace them, or take them out of the folder"
        yield DataFinding(ERROR, text, files)


def size_findings(images: Images, config: RunConfig) -> Iterator[DataFinding]:
    """Yields what ``data.fit`` does to images of another size than the run asks for."""
    height, width = config.target_size or (config.height, config.width)
    asked = f"{height} x {width}"
    others = [one for one in images if one.facts and one.size != (height, width)]
    far = [one.path for one in others if max(one.size[0] / height, one.size[1] / width) > FAR]
    paths = [f"{one.path}: {one.size[0]} x {one.size[1]}" for one in others]
    if not others:
        return
    if config.data.fit == "error":
        yield DataFinding(ERROR, f"not of {asked} pixels, which data.fit=error refuses", paths)
    elif config.data.crops:
        text = f"cropped or padded to {asked} pixels (data.fit={config.data.fit})"
        yield DataFinding(NOTE, text, paths)
    else:
        yield DataFinding(NOTE, f"resized to {asked} pixels (data.fit=resize)", paths)
        if far:
            text = f"shrunk more than twice to {asked} pixels: small things vanish"
            yield DataFinding(WARNING, text, far)


def colour_findings(images: Images) -> Iterator[DataFinding]:
    """Yields what a run changes in the colours, bits and orientation of some files."""
    known = [(image, image.facts) for image in images if image.facts is not None]
    lossy = [(i, f) for i, f in known if f.format == "PNG" and f.bits > 8 and f.colours != "grey"]
    kinds = {"colour" if f.colours.startswith(("RGB", "CMYK", "pal")) else "grey" for _, f in known}
    cases: list[tuple[str, str, Callable[[ImageFacts], bool]]] = [
        (
            WARNING,
            "shown rotated or mirrored elsewhere (EXIF); a run reads the rows as they are stored",
            lambda facts: facts.is_rotated,
        ),
        (
            NOTE,
            "with an alpha channel, which a run leaves out unless model.channels counts it",
            lambda facts: facts.colours.endswith("+alpha"),
        ),
        (NOTE, "in CMYK, converted to RGB without a colour profile", _begins("CMYK")),
        (NOTE, "with a palette, read as its colours", _begins("palette")),
    ]
    if len(kinds) > 1:
        text = "grey among images in colour: every channel gets the same values"
        cases.append((NOTE, text, _begins("grey")))
    for severity, text, applies in cases:
        files = [image.path for image, facts in known if applies(facts)]
        if files:
            yield DataFinding(severity, text, files)
    if lossy:
        text = "with 16 bits a colour, of which 8 are read; save them as TIFF to keep all"
        yield DataFinding(WARNING, text, [image.path for image, _ in lossy])
    bits = collections.Counter(facts.bits for _, facts in known)
    if len(bits) > 1:
        usual = bits.most_common(1)[0][0]
        text = f"of another bit depth than {usual}; white is the largest value of each file"
        yield DataFinding(NOTE, text, [f"{i.path}: {f.bits}" for i, f in known if f.bits != usual])


def _begins(name: str) -> Callable[[ImageFacts], bool]:
    return lambda facts: facts.colours.startswith(name)


def same_pixels(images: Images, label: dict[str, str]) -> Iterator[DataFinding]:
    """Yields images that are there several times; ``label`` is the class of each file."""
    first: dict[bytes, str] = {}
    same: list[str] = []
    apart: list[str] = []
    for image in images:
        if not image.digest:
            continue
        other = first.setdefault(image.digest, image.path)
        if other != image.path:
            known = same if label.get(other) == label.get(image.path) else apart
            known.append(f"{image.path}: {other}")
    if apart:
        yield DataFinding(WARNING, "with the pixels of an image of another class", apart)
    if same:
        yield DataFinding(WARNING, "with the pixels of another image, which counts twice", same)
