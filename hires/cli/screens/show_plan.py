"""Shows a plan as text.

Placement as a grid, the pipeline's time line, what travels in one step, and all findings, read from
the dict that ``plan.json`` holds.
"""

from __future__ import annotations

from typing import Any

from hires.cli.screens.show_memory import memory_lines
from hires.core.text_table import aligned
from hires.core.units import count, seconds, size
from hires.plan.proof.machine import MAILBOXES

Facts = dict[str, Any]

MAX_REPLICAS = 8
"""With more than this, one stands for all."""

_MOST = 8
"""Problems of one proof that a screen shows."""


def plan_lines(plan: Facts, timeline: list[str], limit: int | None = None) -> list[str]:
    """Returns the text of a plan; only the findings if they kept it from being made.

    Args:
        plan: as :meth:`hires.plan.plan.Plan.to_dict` gives it.
        timeline: one line a stage, as :meth:`hires.plan.plan.Plan.timeline` gives it.
        limit: most bytes that a rank may need, if that is set.
    """
    findings = finding_lines(plan["findings"])
    if not any(stage["num_layers"] for stage in plan["stages"]):
        return ["findings", *(f"  {line}" for line in findings)]
    who = "stage" if plan["num_directions"] == 1 else "rank"
    sections: list[tuple[str, list[str]]] = [
        ("placement (ranks)", placement_lines(plan)),
        ("stages", _stage_lines(plan)),
        (
            "time line of a step (F forward, B backward, one column an action)",
            [f"{who} {index}  {line}" for index, line in enumerate(timeline)],
        ),
        ("messages of a step, all ranks", message_lines(plan.get("totals", {}))),
        ("memory of a rank", memory_lines(plan.get("memory", []), limit)),
        ("findings", findings + ([plan["verdict"]] if plan.get("verdict") else [])),
        *_proof_section(plan),
    ]
    lines: list[str] = []
    for title, body in sections:
        if title.startswith("memory") and not body:
            continue
        lines += [title, *(f"  {line}" for line in body), ""]
    return lines[:-1]


def placement_lines(plan: Facts) -> list[str]:
    """Returns a block for each replica and direction: the ranks of every stage, side by side."""
    lines: list[str] = []
    replicas = sorted({slot["replica"] for slot in plan["placement"]})
    shown = replicas if len(replicas) <= MAX_REPLICAS else replicas[:1]
    for replica in shown:
        slots = [slot for slot in plan["placement"] if slot["replica"] == replica]
        if any(slot["replica"] for slot in plan["placement"]):
            lines.append(f"replica {replica}")
        directions = list(dict.fromkeys(slot["direction"] for slot in slots))
        for direction in directions:
            held = [slot for slot in slots if slot["direction"] == direction]
            blocks = [_block(held, stage) for stage in plan["stages"]]
            if len(directions) > 1:
                lines.append(direction)
            lines += _beside(blocks)
    if len(shown) < len(replicas):
        ranks = plan["world"] // len(replicas)
        lines.append(f"and {len(replicas) - 1} more replicas, alike, each {ranks} ranks further")
    return lines


def message_lines(totals: Facts) -> list[str]:
    """Returns one line a kind of message: how many a step, how many bytes."""
    rows = [
        (kind, f"{facts['messages']}", size(facts["bytes"]))
        for kind, facts in totals.get("by_kind", {}).items()
        if facts["messages"]
    ]
    if not rows:
        return ["none"]
    rows.append(("all", f"{totals['messages']}", size(totals["bytes"])))
    return aligned([("kind", "messages", "bytes"), *rows])


def proof_lines(proofs: list[Facts]) -> list[str]:
    """Returns one line a proof, and the problems of those that failed below it.

    Args:
        proofs: as :meth:`hires.plan.proof.prove.Verdict.to_dict` gives them.
    """
    rows = [
        ("semantics", "backends", "receives posted", "verdict", "messages", "collectives", "time")
    ]
    for proof in proofs:
        right = "deadlock-free" if proof["ok"] else "FAILS" if proof["decides"] else "fails"
        posted = {"ahead": "one action ahead", "joined": "with the sends before"}[proof["order"]]
        counted = (str(proof["messages"]), str(proof["collectives"]), seconds(proof["seconds"]))
        backends = ", ".join(proof["backends"]) or "-"
        rows.append((proof["semantics"], backends, posted, right, *counted))
    lines = aligned(rows)
    shown = [lines[0]]
    for line, proof in zip(lines[1:], proofs, strict=True):
        problems = [part for text in proof["problems"][:_MOST] for part in _parts(text)]
        if len(proof["problems"]) > _MOST:
            problems.append(f"and {len(proof['problems']) - _MOST} more; --json shows all")
        shown += [line, *(f"    {part}" for part in problems)]
    return shown


def _proof_section(plan: Facts) -> list[tuple[str, list[str]]]:
    """Returns the title and lines of the proofs, with ``--prove``."""
    if "proofs" not in plan:
        return []
    mailed = any(p["decides"] and p["semantics"] == MAILBOXES for p in plan["proofs"])
    memory = "; small halos within a machine through memory" if mailed else ""
    title = f"proof (the messages of this plan go through {plan['backend']}{memory})"
    return [(title, proof_lines(plan["proofs"]) if plan["proofs"] else ["not made"])]


def _parts(problem: str) -> list[str]:
    """Returns a problem with a line for each rank that waits."""
    first, *others = problem.split("; ")
    return [first, *(f"  {other}" for other in others)]


def finding_lines(findings: list[Facts]) -> list[str]:
    """Returns one line a finding, errors first."""
    order = {"error": 0, "warning": 1, "note": 2}
    ranked = sorted(findings, key=lambda finding: order[finding["severity"]])
    return [f"{f['severity']}: {f['text']} [{f['key']}]" for f in ranked]


def _block(slots: list[Facts], stage: Facts) -> list[str]:
    """Returns the title of a stage and its grid of ranks; shards stand one below the other."""
    index, (num_rows, num_cols) = stage["index"], stage["tiles"]
    num_rows = max(num_rows, stage["shards"])
    ranks = {
        tuple(s["tile"] or (s["shard"] or 0, 0)): s["rank"] for s in slots if s["stage"] == index
    }
    width = max(len(str(rank)) for rank in ranks.values())
    rows = [
        " ".join(f"{ranks[row, col]:>{width}}" for col in range(num_cols))
        for row in range(num_rows)
    ]
    return [f"stage {index}", *(f"[ {row} ]" for row in rows)]


def _beside(blocks: list[list[str]]) -> list[str]:
    height = max(len(block) for block in blocks)
    columns = []
    for block in blocks:
        width = max(len(line) for line in block)
        columns.append([f"{line:<{width}}" for line in block + [""] * (height - len(block))])
    return ["   ".join(parts).rstrip() for parts in zip(*columns, strict=True)]


def _stage_lines(plan: Facts) -> list[str]:
    """Returns one line a stage: its layers and what they cost."""
    rows = [("stage", "layers", "from", "to", "tiles", "shards", "FLOPs", "parameters")]
    for stage in plan["stages"]:
        rows.append(
            (
                str(stage["index"]),
                str(stage["num_layers"]),
                str(stage["first_layer"]),
                str(stage["last_layer"]),
                "x".join(str(n) for n in stage["tiles"]),
                str(stage["shards"]),
                count(stage["flops"]),
                count(stage["params"]),
            )
        )
    return aligned(rows)
