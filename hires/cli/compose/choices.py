"""Lists the choices of every config group, and the stored sweeps.

They are read from the folders of ``conf/`` without Hydra, because ``hires list``, the shell
completion and every answer to a typo need them at once.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

from hires.core.errors import ConfigError

Groups = dict[str, dict[str, str]]
"""Group -> choice -> one line that says what it is."""

EXPERIMENTS = "experiment"
"""Folder beside the groups whose files are sweeps, not choices of one run."""

ALIASES = {
    "parts": ("parallel.microbatches", "pieces of the batch"),
    "split_size": ("parallel.stages", "slices of the network"),
    "num_spatial_parts": ("parallel.tiles", "tiles of a spatial stage: rows times columns"),
    "slice_method=square": ("parallel.tiles=[2,2]", "n x n tiles"),
    "slice_method=vertical": ("parallel.tiles=[1,4]", "columns"),
    "slice_method=horizontal": ("parallel.tiles=[4,1]", "rows"),
    "times": ("parallel.pairs", "model passes of each direction in a step (GEMS)"),
    "local_dp_lp": ("parallel.local_dp", "ranks that divide the samples behind the tiles"),
    "spatial_size": ("parallel.spatial_stages", "stages whose images are tiled"),
    "image_size": ("image", "pixels, n or [height,width]"),
    "batch_size": ("batch", "images per step of the whole world"),
}
"""Words of the thesis and its scripts -> (our key, what it says)."""


def conf_dir() -> Path:
    """Returns the folder that holds ``config.yaml`` and the groups.

    It is ``hires.conf`` where hires is installed, and ``conf`` beside the package in a checkout.

    Raises:
        ConfigError: neither is there, so the installation is broken.
    """
    spec = importlib.util.find_spec("hires.conf")
    places = list(spec.submodule_search_locations or []) if spec else []
    places.append(str(Path(__file__).resolve().parents[2] / "conf"))
    for place in places:
        if (Path(place) / "config.yaml").is_file():
            return Path(place).resolve()
    raise ConfigError(
        f"the config files of hires are missing (looked in {', '.join(places)}); "
        f"install hires again"
    )


def groups(extra: Path | None = None) -> Groups:
    """Returns every group with its choices, those of the folder ``extra`` included.

    Raises:
        ConfigError: ``extra`` is not a folder.
    """
    choices: Groups = {}
    for base in _bases(extra):
        for path in sorted(base.glob("*/*.yaml"), key=_natural):
            if path.parent.name != EXPERIMENTS:
                choices.setdefault(path.parent.name, {}).setdefault(path.stem, _summary(path))
    return choices


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A stored sweep."""

    path: Path
    summary: str
    """One line that says what it compares."""


def experiments(extra: Path | None = None) -> dict[str, Experiment]:
    """Returns every stored sweep by its name; those of the folder ``extra`` hide ours.

    Raises:
        ConfigError: ``extra`` is not a folder.
    """
    stored: dict[str, Experiment] = {}
    for base in _bases(extra):
        for path in sorted(base.glob(f"{EXPERIMENTS}/*.yaml"), key=_natural):
            stored[path.stem] = Experiment(path, _summary(path))
    return stored


def _bases(extra: Path | None) -> list[Path]:
    """Returns the folders of config files: ours, and ``extra`` if it is given."""
    if extra is not None and not extra.is_dir():
        raise ConfigError(
            f"--config-dir {extra} (or HIRES_CONF) is not a folder; give one with GROUP/NAME.yaml"
        )
    return [conf_dir()] + ([extra] if extra else [])


def _natural(path: Path) -> list[tuple[int, str]]:
    """Returns a key that sorts groups by name and choices by the numbers in theirs."""
    parts = re.split(r"(\d+)", path.stem)
    order = [(int(part), "") if part.isdigit() else (0, part) for part in parts]
    return [(0, path.parent.name), *order]


def _summary(path: Path) -> str:
    """Returns the comment on the first line of a YAML file, or nothing."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline().strip()
    return first.lstrip("# ") if first.startswith("#") else ""
