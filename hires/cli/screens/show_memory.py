"""Shows the memory of a plan's ranks: a bar for each, and its parts in MiB."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from hires.core.text_table import aligned
from hires.core.units import MIB, size
from hires.plan.memory import Room
from hires.plan.plan import Plan

_WIDTH = 24
"""Characters of a full bar; all columns together fit 80."""
_PARTS = (
    ("params_bytes", "P", "parameters"),
    ("grads_bytes", "G", "gradients"),
    ("optimizer_bytes", "O", "optimiser"),
    ("activations_bytes", "A", "activations"),
    ("buffers_bytes", "B", "buffers"),
)


def memory_lines(memory: Sequence[dict[str, Any]], limit: int | None = None) -> list[str]:
    """Returns a bar for each rank of a replica at the fullest moment of a step.

    Ranks side by side that need the same share a line.

    Args:
        memory: as ``plan.json`` holds it.
        limit: bytes of a full bar; unset: the largest rank.
    """
    if not memory:
        return []
    full = limit or max(entry["peak_bytes"] for entry in memory)
    rows = [("rank", "", "peak", *(letter for _, letter, _ in _PARTS))]
    for ranks, entry in _alike(memory):
        parts = [f"{entry[key] / MIB:.1f}" for key, _, _ in _PARTS]
        rows.append((ranks, bar(entry, full), f"{entry['peak_bytes'] / MIB:.1f}", *parts))
    lines = aligned(rows, "llrrrrrr")
    scale = f"memory.limit, {size(full)}" if limit else size(full)
    names = ", ".join(f"{letter} {name}" for _, letter, name in _PARTS)
    return [*lines, names, f"MiB, predicted; a full bar is {scale}"]


def node_lines(room: Room, plan: Plan) -> list[str]:
    """Returns what the ranks of each machine need together; nothing unless nodes are counted.

    Machines side by side that need the same share a line.
    """
    if not plan.memory or not room.counts_nodes:
        return []
    has = f" of {size(room.machine_bytes)}" if room.machine_bytes is not None else ""
    lines, first = [], 0
    for needs, run in groupby(room.per_node(plan), key=lambda one: (len(one.ranks), one.bytes)):
        last = first + len(list(run)) - 1
        name = f"node {first}" if first == last else f"nodes {first}-{last}"
        many = f"{needs[0]} rank" + ("s" if needs[0] > 1 else "")
        lines.append(f"{name}: {many} need{'' if needs[0] > 1 else 's'} {size(needs[1])}{has}")
        first = last + 1
    return lines


def bar(entry: dict[str, Any], full: int) -> str:
    """Returns a bar of letters, one for each part, points for what is free, ``>`` beyond the end.

    The ends of the parts are rounded, not their lengths, so that the whole is as long as it should.
    """
    text, end = "", 0
    for key, letter, _ in _PARTS:
        end += entry[key]
        text += letter * (round(_WIDTH * end / full) - len(text))
    if len(text) > _WIDTH:
        return f"[{text[: _WIDTH - 1]}>]"
    return f"[{text.ljust(_WIDTH, '.')}]"


def _alike(memory: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Returns runs of ranks that need the same, as ``0-3``, with what they need."""
    named = []
    for entry, run in groupby(enumerate(memory), key=lambda item: item[1]):
        ranks = [rank for rank, _ in run]
        name = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        named.append((name, entry))
    return named
