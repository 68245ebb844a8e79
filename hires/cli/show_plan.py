"""Shows a plan as text, read from the dict that ``plan.json`` holds, and layouts to choose from."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain, groupby, repeat, zip_longest
from typing import Any

from hires.cli.screen import plural, table_lines
from hires.core import streams
from hires.core.config.parallel_config import OBJECTIVES
from hires.core.units import MIB, count, seconds, size
from hires.plan.memory import RankMemory, Room
from hires.plan.plan import Finding, Plan
from hires.plan.search.choice import Choice, Option

Facts = dict[str, Any]

MAX_REPLICAS = 8
"""With more than this, one stands for all."""
_MOST = 8  # problems of one proof
_INDENT = 2  # characters before the lines of a section
_WIDTH = 24  # characters of a full bar; all columns together fit 80
_PARTS = [
    (f.name, f.metadata["letter"], f.metadata["name"]) for f in fields(RankMemory) if f.metadata
]
_ALWAYS = 5  # of these are shown though no rank has any


def plan_lines(plan: Facts, timeline: list[str], limit: int | None = None) -> list[str]:
    """Returns the text of a plan; ``limit`` is the most bytes that a rank may need."""
    width = streams.columns()
    findings = [
        part
        for line in finding_lines(Finding(**one) for one in plan["findings"])
        for part in (textwrap.wrap(line, width - _INDENT) if width else [line])
    ]
    if not any(stage["num_layers"] for stage in plan["stages"]):
        return ["findings", *(f"  {line}" for line in findings)]
    who = "stage" if plan["num_directions"] == 1 else "rank"
    drawn = [f"{who} {index}  {line}" for index, line in enumerate(timeline)]
    sections = {
        "placement (ranks)": placement_lines(plan),
        "stages": [*_stage_lines(plan), *rewriting_lines(plan)],
        "time line of a step (F forward, B backward, one column an action)": drawn,
        "messages of a step, all ranks": message_lines(plan.get("totals", {})),
    }
    if plan.get("memory"):
        why = start_reason(plan["graph"]["params"])
        sections["memory of a rank"] = memory_lines(plan["memory"], limit, why)
    sections["findings"] = findings + ([plan["verdict"]] if plan.get("verdict") else [])
    if "proof" in plan:  # asked for with --prove
        sections["proof"] = proof_lines(plan["proof"]) if plan["proof"] else ["not made"]
    texts = ("\n  ".join([title, *body]) for title, body in sections.items())
    return "\n\n".join(texts).split("\n")


def placement_lines(plan: Facts) -> list[str]:
    """Returns a block for each replica and direction: the ranks of every stage, side by side."""
    lines: list[str] = []
    replicas = sorted({slot["replica"] for slot in plan["placement"]})
    shown = replicas if len(replicas) <= MAX_REPLICAS else replicas[:1]
    for replica in shown:
        slots = [slot for slot in plan["placement"] if slot["replica"] == replica]
        if replicas != [0]:
            lines.append(f"replica {replica}")
        directions = list(dict.fromkeys(slot["direction"] for slot in slots))
        for direction in directions:
            own = [slot for slot in slots if slot["direction"] == direction]
            if len(directions) > 1:
                lines.append(direction)
            blocks = [_block(own, stage) for stage in plan["stages"]]
            widest = max(len(line) for block in blocks for line in block)
            beside = max(1, ((streams.columns() or 10**6) - _INDENT) // (widest + 2))
            for first in range(0, len(blocks), beside):
                rows = [*zip_longest(*blocks[first : first + beside], fillvalue="")]
                lines += table_lines(rows, "l" * len(rows[0]), heads=False, indent=_INDENT)
    if len(shown) < len(replicas):
        ranks = plan["world"] * plan["resident"] // len(replicas)
        lines.append(f"and {len(replicas) - 1} more replicas, alike, each {ranks} ranks further")
    return lines


def rewriting_lines(plan: Facts) -> list[str]:
    """Returns a line about what the operators of an inference are made of, if they are."""
    made = [(param.get("recipe") or {}).get("make") for param in plan["graph"]["params"].values()]
    kinds = [node["op"].partition(".")[0] for node in plan["graph"]["nodes"]]
    parts = {
        "norms folded": made.count("folded_weight"),
        "values computed at the start": made.count("computed"),
        "norms as one product and sum": kinds.count("fused_norm"),
        "convolutions with their sum or activation": kinds.count("fused_conv2d"),
        "linear layers with their activation": kinds.count("fused_linear"),
    }
    shown = ", ".join(f"{number} {what}" for what, number in parts.items() if number)
    return [f"fused: {shown} (engine.fuse=off: none)"] if shown else []


def message_lines(totals: Facts) -> list[str]:
    """Returns how many messages of one kind and size a step has on each route, and their bytes."""
    rows = [one for one in totals.get("by_route", ()) if one["messages"]]
    if not rows:
        return ["none"]
    lines = [["kind", "size", "messages", "bytes", "through"]]
    for kind, own in groupby(rows, key=lambda one: one["kind"]):
        for first, one in zip(chain([kind], repeat("")), own, strict=False):
            counted = f"{one['messages']}", size(one["bytes"])
            lines.append([first, one["class"], *counted, one["route"]])
    lines.append(["all", "", f"{totals['messages']}", size(totals["bytes"]), ""])
    used = [at for at in range(len(lines[0])) if any(line[at] for line in lines[1:])]
    rows = [[line[at] for at in used] for line in lines]
    return table_lines(rows, "".join("llrrl"[at] for at in used), indent=_INDENT)


def proof_lines(proof: Facts) -> list[str]:
    """Returns the proof in one line, and its problems below it."""
    rows = [("backends", "verdict", "messages", "collectives", "time")]
    right = "deadlock-free" if proof["ok"] else "FAILS"
    counted = (str(proof["messages"]), str(proof["collectives"]), seconds(proof["seconds"]))
    rows.append((", ".join(proof["backends"]), right, *counted))
    lines = table_lines(rows, indent=_INDENT)
    # A problem has a line for each rank that waits.
    problems = [one.replace("; ", "\n      ") for one in proof["problems"][:_MOST]]
    if len(proof["problems"]) > _MOST:
        problems.append(f"and {len(proof['problems']) - _MOST} more; --json shows all")
    shown = "\n    ".join([lines[2], *problems]).split("\n")
    return [*lines[:2], *shown, *lines[3:]]


def start_reason(params: Mapping[str, Facts]) -> str:
    """Returns what a rank does with its weights, of these parameters, before it computes."""
    if any(one.get("recipe") for one in params.values()):
        return "weights are computed from others there"
    return "weights are brought into the order of their kernels there"


def memory_lines(
    memory: Sequence[dict[str, Any]], limit: int | None = None, why: str = ""
) -> list[str]:
    """Returns a bar for each rank of a replica at its peak, alike ones on one line.

    ``why`` says for what the start may need more (:func:`start_reason`).
    """
    if not memory:
        return []
    full = limit or max(entry["device_bytes"] for entry in memory)
    parts = _parts(memory)
    digits = 1 if len(parts) == _ALWAYS else 0  # all columns fit 80
    rows = [("rank", "", "peak", *(letter for _, letter, _ in parts))]
    for entry, run in groupby(enumerate(memory), key=lambda item: item[1]):
        ranks = [str(rank) for rank, _ in run]
        name = "-".join(dict.fromkeys((ranks[0], ranks[-1])))
        numbers = entry["device_bytes"], *(entry[key] for key, _, _ in parts)
        cells = [f"{num_bytes / MIB:.{digits}f}" for num_bytes in numbers]
        rows.append((name, bar(entry, full), *cells))
    lines = table_lines(rows, "ll" + "r" * (len(parts) + 1), indent=_INDENT)
    scale = f"memory.limit, {size(full)}" if limit else size(full)
    named = [f"{letter} {name}" for _, letter, name in parts]
    names = [", ".join(some) for some in (named[:_ALWAYS], named[_ALWAYS:]) if some]
    start = max(entry.get("start_bytes", 0) for entry in memory)
    more = start > max(entry["device_bytes"] for entry in memory)
    note = ": ".join(filter(None, (f"the start needs up to {size(start)}", why)))
    return [*lines, *names, f"MiB, predicted; a full bar is {scale}", *([note] if more else [])]


def node_lines(room: Room, plan: Plan) -> list[str]:
    """Returns what each machine's ranks need, alike ones on one line; empty if not counted."""
    if not plan.memory or not room.counts_nodes:
        return []
    has = f" of {size(room.machine_bytes)}" if room.machine_bytes is not None else ""
    kind, all_needs = "GPU" if room.devices else "node", room.per_node(plan)
    lines, first = [], 0
    for needs, run in groupby(all_needs, key=lambda one: (len(one.ranks), one.bytes)):
        last = first + len(list(run)) - 1
        name = f"{kind} {first}" if first == last else f"{kind}s {first}-{last}"
        need = "1 rank needs" if needs[0] == 1 else f"{needs[0]} ranks need"
        lines.append(f"{name}: {need} {size(needs[1])}{has}")
        first = last + 1
    if len(all_needs) > 1:
        total = sum(one.bytes for one in all_needs)
        lines.append(f"all {len(all_needs)} {kind}s together: {size(total)}")
    return lines


def bar(entry: dict[str, Any], full: int) -> str:
    """Returns a bar of letters, one a part, points for what is free, ``>`` beyond the end."""
    text, end = "", 0  # ends are rounded, not lengths, so that the whole is as long as it should
    for key, letter, _ in _parts([entry]):
        end += entry.get(key, 0)
        text += letter * (round(_WIDTH * end / full) - len(text))
    if len(text) > _WIDTH:
        return f"[{text[: _WIDTH - 1]}>]"
    return f"[{text.ljust(_WIDTH, '.')}]"


def _parts(memory: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Returns what memory is for: on GPUs more than on CPUs."""
    used = [part for part in _PARTS[_ALWAYS:] if any(entry.get(part[0]) for entry in memory)]
    return [*_PARTS[:_ALWAYS], *used]


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """Returns one line a finding, errors first."""
    order = {"error": 0, "warning": 1, "note": 2}
    ranked = sorted(findings, key=lambda finding: order[finding.severity])
    return [f"{finding.severity}: {finding}" for finding in ranked]


def _block(slots: list[Facts], stage: Facts) -> list[str]:
    index, (num_rows, num_cols) = stage["index"], stage["tiles"]
    own = [slot for slot in slots if slot["stage"] == index]
    ranks = {tuple(slot["tile"] or (slot["shard"] or 0, 0)): slot["rank"] for slot in own}
    width = max(len(str(rank)) for rank in ranks.values())
    lines = [f"stage {index}"]
    for row in range(max(num_rows, stage["shards"])):
        cells = (f"{ranks[row, col]:>{width}}" for col in range(num_cols))
        lines.append(f"[ {' '.join(cells)} ]")
    return lines


def _stage_lines(plan: Facts) -> list[str]:
    rows = [["stage", "layers", "from", "to", "tiles", "shards", "FLOPs", "parameters"]]
    for stage in plan["stages"]:
        layers = (stage[key] for key in ("index", "num_layers", "first_layer", "last_layer"))
        tiles = "x".join(map(str, stage["tiles"]))
        costs = (count(stage["flops"]), count(stage["params"]))
        rows.append([*map(str, layers), tiles, str(stage["shards"]), *costs])
    return table_lines(rows, indent=_INDENT)


SHOWN = 12
"""Layouts in the table, the best of each division of the ranks; ``--json`` has all."""
SHOWN_REASONS = 6
MEANING = {
    "compute": "computing takes most of the step",
    "messages": "waiting for messages takes most of it",
    "bubble": "waiting for other stages takes most of it",
    "cores": "there are more ranks than cores or GPUs, and they take turns",
    "memory": "memory decides: nearly all of it is used, or passes are computed again to save it",
}
"""What the column ``limited by`` says."""


def choice_lines(choice: Choice) -> list[str]:
    """Returns the answer of ``hires plan --choose`` in lines."""
    options = best_of_shapes(choice.options)[:SHOWN]
    head = ["", "layout", "step", "images/s", "memory", "bubble", "sent", "limited by", "keys"]
    rows = [head, *(_row(number, one) for number, one in enumerate(options, start=1))]
    lines = table_lines(rows, "rlrrrrrll")
    order = "least memory first" if choice.objective == "memory" else "fastest first"
    ranks = plural(choice.ranks, "rank")
    text = [f"Layouts of {ranks} that fit, {order}", "", *lines, ""]
    if any(not one.rehearsed for one in options):
        text.append("~ memory that was estimated; a run's plan predicts it exactly")
    text += [f"{name}: {MEANING[name]}" for name in MEANING if name in {o.limit for o in options}]
    text += [*_others(choice), f"step times: {choice.source}"]
    first, config = choice.best.candidate.overrides, choice.best.config
    if choice.objective == OBJECTIVES[2]:
        first = f"image=[{config.height},{config.width}] {first}"
    text += [f"to run the first: hires run parallel=auto ..., or with its keys: {first}"]
    return text


def best_of_shapes(options: Sequence[Option]) -> list[Option]:
    """Returns the first option of each division of the ranks, in their order."""
    first: dict[object, Option] = {}
    for option in options:
        first.setdefault(option.candidate.shape, option)
    return [*first.values()]


def _row(number: int, option: Option) -> list[str]:
    memory = size(option.peak_bytes)
    return [
        str(number),
        option.config.parallel.label,
        seconds(option.time.step_s),
        f"{option.images_per_s:.3g}",
        memory if option.rehearsed else f"~{memory}",
        f"{option.time.bubble:.0%}",
        size(option.sent_bytes),
        option.limit,
        option.candidate.overrides,
    ]


def _others(choice: Choice) -> Iterable[str]:
    planned = f"{choice.planned} of {choice.considered} layouts were planned"
    earlier = "; this is an earlier search (HIRES_CACHE=off searches anew)" if choice.kept else ""
    yield f"{planned} in {seconds(choice.seconds)}{earlier}"
    if choice.left:
        yield f"{choice.left} were not: they are slower by their estimate, or resemble a faster one"
    more = len(choice.options) - min(SHOWN, len(best_of_shapes(choice.options)))
    if more > 0:
        yield f"{more} more that fit, most with other orders or cuts of the same ranks: --json"
    for one in choice.out[:SHOWN_REASONS]:
        needs = f"needs {size(one.peak_bytes)} on one rank"
        yield f"out: {one.candidate.overrides} ({needs if one.limit in MEANING else one.limit})"
    for reason, number in choice.reasons.most_common(SHOWN_REASONS):
        yield f"out: {plural(number, 'layout')}: {reason}"
