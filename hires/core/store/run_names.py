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


def named(name: str, results: StrPath = "results") -> NamedRuns:
    """Returns the runs of a campaign, by its name or folder, or a run, by folder, name or hash.

    A name of neither, and one of several runs, is a ConfigError.
    """
    for folder in (Path(results) / name, Path(name)):
        if name and _is_campaign(folder):
            return _together([folder])
    if run := _run_named(name, results):
        return NamedRuns([run], [])
    others = ", ".join(folder.name for folder in campaigns(results))
    there = f"the campaigns under {results}/ are {others}"
    there = there if others else f"there is no campaign under {results}/ at all"
    raise ConfigError(
        f"{name!r} is no campaign and no run: {there}; a run is named by its folder, its name or "
        f"the beginning of its hash"
    )


def locate(name: str, results: StrPath = "results") -> Path:
    """Returns the one run folder that a name means, as for :func:`named`.

    A name of no run, or of several, as of a campaign, is a ConfigError.
    """
    runs, folders = named(name, results)
    if not folders:
        return runs[0]
    folder, count = folders[0].name, f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
    one = f"name one of them, as {folder}/{runs[0].name}; " if runs else ""
    raise ConfigError(
        f"{name!r} is a campaign of {count}; {one}`hires list runs --campaign {folder}` lists "
        f"them, `hires report {folder}` shows them all"
    )


def _run_named(name: str, results: StrPath) -> Path | None:
    """Returns the run of a path, name or beginning of a hash; a ConfigError: there are several."""
    if os.path.lexists(Path(name) / file_names.CONFIG):  # what is wrong with it is said later
        return Path(name).absolute()
    if name and file_names.attempt_numbers(Path(name)):
        raise ConfigError(f"{name} has attempts and no {file_names.CONFIG}: copy that there again")
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


def matching(values: Any, results: StrPath = "results") -> NamedRuns:
    """Returns the runs of a path, a pattern or a name as for :func:`named`, or of several of them.

    A path may also be the folder of all results; None means ``results``.

    Raises:
        ConfigError: one of them means no run and no campaign.
        TypeError: one of them is neither text nor a path.
    """
    if values is None:
        values = results
    one = isinstance(values, str | os.PathLike) or not isinstance(values, Iterable)
    parts = [_matching(value, results) for value in ([values] if one else values)]
    return merged(parts)


def _matching(value: Any, results: StrPath) -> NamedRuns:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"runs are paths, patterns or names, as 'results/fig2*' or 'default', not {value!r}"
        )
    name = str(os.fspath(value))
    if name and is_dir(name) and not _is_campaign(Path(results) / name):
        made = _together([Path(name)])
        if made == ([], []):
            raise ConfigError(
                f"{name!r} has no run in it; give the folder of a run, of a campaign or of all "
                f"results, or start a run with `hires run`"
            )
        return made
    if not glob.has_magic(name):
        return named(name, results)
    for top in (Path(), Path(results)):
        made = _together(_folders(top, Path(name)))
        if made != ([], []):
            return made
    others = ", ".join(folder.name for folder in campaigns(results)) or "none"
    raise ConfigError(
        f"{name!r} matches no folder with runs in {Path.cwd()}, nor below {results}/, whose "
        f"campaigns are: {others}"
    )


def _folders(top: Path, pattern: Path) -> list[Path]:
    if pattern.anchor:
        top, pattern = Path(pattern.anchor), pattern.relative_to(pattern.anchor)
    found = (path for path in top.glob(str(pattern)) if not path.name.startswith("."))
    return sorted(path for path in found if is_dir(path))


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
