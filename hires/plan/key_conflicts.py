"""Finds keys of a layout that do not go together, whatever the network.

Each key alone makes sense (:mod:`hires.core.config.parallel_config`). These findings are shown with
those of the plan, so that a layout is corrected in one go.
"""

from __future__ import annotations

from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig
from hires.plan.plan import Finding


def check_together(config: RunConfig) -> list[Finding]:
    """Returns an error for every two keys of a layout that do not go together."""
    parallel = config.parallel
    return [
        *_check_mirror(parallel),
        *_check_pairs(config),
        *_check_schedule(parallel),
        *_check_local_dp(parallel),
    ]


def _check_mirror(parallel: ParallelConfig) -> list[Finding]:
    """Returns an error if there is nothing that two directions could mirror."""
    if parallel.directions == 1 or parallel.num_ranks > parallel.replicas:
        return []
    others = ["parallel.schedule=gpipe"] if _is_mirrored(parallel.schedule) else []
    others += ["parallel.pairs=1"] if parallel.pairs > 1 else []
    text = (
        f"parallel.directions=2 mirrors the stages over the ranks, but there is one rank; use "
        f"parallel.stages=2{_freed(parallel)}, or parallel.directions=1"
        f"{' with ' if others else ''}{' and '.join(others)}"
    )
    return [Finding("error", "parallel.directions", text)]


def _check_pairs(config: RunConfig) -> list[Finding]:
    parallel = config.parallel
    if parallel.directions > 1 or parallel.pairs == 1:
        return []
    most, unit = parallel.pairs * parallel.microbatches, parallel.replicas * parallel.local_dp
    # As many as there were, or the next fewer that the batch divides into.
    fitting = (n for n in range(most, 0, -1) if config.batch % (unit * n) == 0)
    text = (
        f"parallel.pairs={parallel.pairs} needs parallel.directions=2 (parallel=gems); in one "
        f"direction use parallel.pairs=1 with parallel.microbatches={next(fitting, most)}"
    )
    return [Finding("error", "parallel.pairs", text)]


def _check_schedule(parallel: ParallelConfig) -> list[Finding]:
    """Returns an error if the schedule is for another number of directions."""
    both = _is_mirrored(parallel.schedule)
    if both == (parallel.directions == 2):
        return []
    fit = "gems or gems_1f1b" if parallel.directions == 2 else "gpipe or 1f1b"
    text = (
        f"parallel.schedule={parallel.schedule} is for {2 if both else 1} direction"
        f"{'s' if both else ''}; with parallel.directions={parallel.directions} use "
        f"parallel.schedule={fit}"
    )
    return [Finding("error", "parallel.schedule", text)]


def _check_local_dp(parallel: ParallelConfig) -> list[Finding]:
    """Returns an error if no stage is left that could be divided among shards."""
    if parallel.local_dp == 1 or parallel.spatial_stages < parallel.stages:
        return []
    text = (
        f"parallel.local_dp={parallel.local_dp} divides the stages behind the tiles, but all "
        f"{parallel.stages} are tiled; use parallel.stages={parallel.stages + 1}"
        f"{_freed(parallel)}, or parallel.local_dp=1"
    )
    return [Finding("error", "parallel.local_dp", text)]


def _is_mirrored(schedule: str) -> bool:
    return schedule.startswith("gems")


def _freed(parallel: ParallelConfig) -> str:
    """Returns the key that another number of stages needs too, or nothing."""
    return " with parallel.balance=null" if parallel.balance is not None else ""
