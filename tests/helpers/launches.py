"""What a launch of fake ranks left behind, and what tests do to it meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hires.core.store.attempts import Attempt
from hires.core.store.rundir import RunDir
from tests.helpers.patience import until

ROOT = Path(__file__).parents[2]
SRUN = """\
while case $1 in -*) ;; *) false ;; esac; do
    case $1 in --ntasks=*) n=${1#*=} ;; esac; shift
done
export SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=$n SLURM_STEP_TASKS_PER_NODE=$n
for rank in $(seq 0 $((n - 1))); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & pids="$pids $!"
done
trap 'kill $pids' TERM
for pid in $pids; do wait $pid || code=$?; done
exit $code
"""
"""A shell script that starts all ranks on one node, as srun does."""


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    """Returns the events of one kind."""
    return [line for line in Attempt(run, run.attempt).events if line["event"] == name]


def rank_pids(run: RunDir) -> list[int]:
    """Returns the processes of all ranks that were started."""
    return [line["pid"] for line in events(run, "rank_started")]


def pid_of(run: RunDir, rank: int) -> int:
    """Returns the process of a rank."""
    [pid] = [line["pid"] for line in events(run, "rank_started") if line["rank"] == rank]
    return int(pid)


def alive(pids: Iterable[int]) -> list[int]:
    """Returns those of the processes that still run."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def exit_json(run: RunDir, attempt: int | None = None) -> dict[str, Any]:
    """Returns the ``exit.json`` of an attempt, by default of the one that was opened."""
    folder = run.attempt_dir if attempt is None else run.path / f"a{attempt}"
    return dict(json.loads((folder / "exit.json").read_text()))


@contextmanager
def when_ready(
    run: RunDir, num_ranks: int, act: Callable[[], object] | None, words: str = ""
) -> Iterator[None]:
    """Acts in a thread once all ranks have printed something, with ``words`` in it."""

    def ready() -> bool:
        logs = [run.attempt_dir / "logs" / f"rank{rank:04d}.log" for rank in range(num_ranks)]
        texts = [log.read_text() if log.exists() else "" for log in logs]
        return len(rank_pids(run)) >= num_ranks and all(text and words in text for text in texts)

    def wait() -> None:
        until(ready)
        assert act is not None
        act()

    thread = threading.Thread(target=wait)
    if act is not None:
        thread.start()
    try:
        yield
    finally:
        if act is not None:
            thread.join()
