"""Finds the nodes that failed under runs, so that the next attempts avoid them.

An attempt whose end has the reason ``node`` ran on nodes that its events name. If Slurm says which
of them are down, those are avoided; else all of them, as long as enough others are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hires.core.errors import RunError
from hires.core.store.attempts import Attempt
from hires.core.store.file_names import attempt_numbers
from hires.launcher.slurm import allocation
from hires.launcher.status.run_state import RunState

_BAD = ("down", "drain", "fail", "error", "unknown", "reboot", "maint")
"""How Slurm's words for nodes that run nothing begin; an asterisk behind one means no answer."""


def to_exclude(states: Sequence[RunState], num_nodes: int, partition: str | None) -> list[str]:
    """Returns the nodes that the next attempts of runs should avoid, sorted.

    Args:
        states: how the runs ended.
        num_nodes: most nodes that one of them needs.
        partition: of the nodes; None: any.
    """
    suspects = {node for state in states for node in _nodes_of(state)}
    if not suspects:
        return []
    node_states = _node_states(partition)
    bad = {node for node in suspects if _is_bad(node_states.get(node, ""))}
    others = [
        node for node, word in node_states.items() if node not in suspects and not _is_bad(word)
    ]
    return sorted(suspects if not bad and len(others) >= num_nodes else bad)


def _nodes_of(state: RunState) -> Iterable[str]:
    """Yields the nodes of a run's attempts that ended because a node failed."""
    if state.path is None:
        return
    for number in attempt_numbers(state.path):
        attempt = Attempt(state.path, number)
        is_latest = number == state.attempt and state.reason == "node"
        if is_latest or attempt.exit.get("reason") == "node":
            for line in attempt.events:
                if line.get("event") == "rank_started" and line.get("node"):
                    yield str(line["node"])


def _node_states(partition: str | None) -> dict[str, str]:
    """Returns the state of every node in Slurm's words; nothing if it does not answer."""
    only = [f"--partition={partition}"] if partition else []
    try:
        text = allocation.ask("sinfo", "--noheader", "--Node", "--format=%N %T", *only)
    except RunError:
        return {}
    pairs = (line.split(None, 1) for line in text.splitlines())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def _is_bad(word: str) -> bool:
    """Whether a node in this state runs nothing."""
    return word.startswith(_BAD) or word.endswith("*")
