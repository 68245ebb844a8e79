"""Run folders become tables.

hires.load("results/fig2*")      runs, campaigns and patterns as pandas DataFrames
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hires.core.store.file_names import StrPath

if TYPE_CHECKING:
    from hires.report.frames import Frames


def load(runs: StrPath | Iterable[StrPath] | None = None, results: StrPath = "results") -> Frames:
    """Returns the data of runs as pandas DataFrames, with what their campaigns planned.

    Args:
        runs: a folder of a run, a campaign or all results, a pattern of folders as
            ``results/fig2*``, the name of a campaign, the name or the beginning of the hash of a
            run, or several of these; None: all campaigns.
        results: folder of the campaigns; names and patterns are looked for below it, too.

    Raises:
        ConfigError: one of ``runs`` means no run and no campaign, or several runs.
        TypeError: one of ``runs`` is neither text nor a path.
    """
    from hires.core.store import run_names
    from hires.report import frames  # pandas takes a second

    return frames.load(*run_names.matching(runs, results))
