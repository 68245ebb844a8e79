"""Finds the run folders that paths, patterns and names of campaigns and runs mean."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hires.core.errors import ConfigError
from hires.core.store import file_names
from hires.core.store.file_names import StrPath, entries_of, exists, is_dir


class NamedRuns(NamedTuple):
    """Run folders, and those of the campaigns that were meant as a whole; all absolute."""

    paths: list[Path]
    campaigns: list[Path]


def campaigns(results: StrPath = "results") -> list[Path]:
    """Returns the folders of all campaigns, in order."""
    return [entry.absolute() for entry in entries_of(results) if _is_campaign(entry)]


def of_campaign(folder: Path) -> list[Path]:
    """Returns the run folders of a campaign, in order, damaged ones without a config too."""
    return [run for run in entries_of(folder) if is_run(run)]


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, perhaps one whose config is missing or damaged."""
    has_config = os.path.lexists(folder / file_names.CONFIG)
    return has_config or bool(file_names.attempt_numbers(folder))


def matching(values: Any, results: StrPath = "results") -> NamedRuns:
    """Returns the runs that a path, pattern or name means, or several of them; None: ``results``.

    A campaign is named by its name or folder, a run by its folder, its name or the beginning of its
    hash; patterns, as ``fig2*``, and paths are those of runs, campaigns and all results.

    Raises:
        ConfigError: one of them means no run and no campaign, or a name may mean several runs.
        TypeError: one of them is neither text nor a path.
    """
    if values is None:
        values = results
    one = isinstance(values, str | os.PathLike) or not isinstance(values, Iterable)
    return merged(_matching(value, results) for value in ([values] if one else values))


def locate(name: str, results: StrPath = "results") -> Path:
    """Returns the one run folder that a name means, as for :func:`matching`.

    A name of no run, or of several, as of a campaign, is a ConfigError.
    """
    runs, folders = matching(name, results)
    if len(runs) == 1 and not folders:
        if not exists(runs[0] / file_names.CONFIG):
            raise ConfigError(
                f"{runs[0]} has attempts and no {file_names.CONFIG}: copy that there again"
            )
        return runs[0]
    what = f"a campaign of {len(runs)}" if len(folders) == 1 else f"{len(runs)}"
    folder = runs[0].parent.name if runs else name
    item = f"name one of them, as {folder}/{runs[0].name}; " if runs else ""
    raise ConfigError(
        f"{name!r} is {what} run{'' if len(runs) == 1 else 's'}; {item}`hires list runs --campaign "
        f"{folder}` lists them, `hires report {folder}` shows them all"
    )


def _matching(value: Any, results: StrPath) -> NamedRuns:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"runs are paths, patterns or names, as 'results/fig2*' or 'default', not {value!r}"
        )
    name = str(os.fspath(value))
    places = [Path(results) / name, Path(name)] if name else []
    folders = next(([one] for one in places if _is_campaign(one)), places[1:])
    for hits in (folders, *(_folders(top, name) for top in ("", results))):
        made = _together(filter(is_dir, hits))
        if made != ([], []):
            return made
    if run := _run_named(name, results):
        return NamedRuns([run], [])
    others = ", ".join(folder.name for folder in campaigns(results))
    there = f"the campaigns under {results}/ are {others}"
    there = there if others else f"there is no campaign under {results}/ at all"
    raise ConfigError(
        f"{name!r} is no campaign and no run: {there}; a run is named by its folder, its name or "
        f"the beginning of its hash"
    )


def _folders(top: StrPath, pattern: str) -> list[Path]:
    hits = glob.glob(pattern, root_dir=top or None)  # noqa: PTH207 (it takes absolute ones, too)
    return [Path(top) / hit for hit in sorted(hits)]


def _run_named(name: str, results: StrPath) -> Path | None:
    """Returns the run of a name or beginning of a hash; a ConfigError: there are several."""
    folders = [run for folder in campaigns(results) for run in of_campaign(folder)]
    matches = (
        [f for f in folders if name in (f.name, f"{f.parent.name}/{f.name}")],
        [f for f in folders if name and f.name.rpartition("-")[2].startswith(name)],
        [f for f in folders if name and f.name.startswith(name)],
    )
    match = next(filter(None, matches), [])
    if len(match) > 1:
        several = ", ".join(map(str, match[:5]))
        raise ConfigError(f"{name!r} may be any of {len(match)} runs: give one path of {several}")
    return match[0] if match else None


def _together(folders: Iterable[Path]) -> NamedRuns:
    """Returns what folders of runs, campaigns and all results hold; others have no run."""
    parts = []
    for folder in (folder.absolute() for folder in folders):
        if is_run(folder):
            parts.append(NamedRuns([folder], []))
            continue
        held = [folder] if _is_campaign(folder) else campaigns(folder)
        parts.append(NamedRuns([run for one in held for run in of_campaign(one)], held))
    return merged(parts)


def merged(parts: Iterable[NamedRuns]) -> NamedRuns:
    """Returns everything once, in order."""
    paths, whole = {}, {}
    for part in parts:
        paths.update(dict.fromkeys(part.paths))
        whole.update(dict.fromkeys(part.campaigns))
    return NamedRuns([*paths], [*whole])


def _is_campaign(folder: Path) -> bool:
    """Whether a folder holds runs, or the plan of a sweep."""
    if folder.name.startswith(".") or not is_dir(folder) or is_run(folder):
        return False
    return exists(folder / file_names.CAMPAIGN) or bool(of_campaign(folder))
