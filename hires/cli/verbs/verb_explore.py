"""``hires explore``: runs a small program of communication calls over all interleavings.

It starts no ranks: the program is a file, and the ranks, backends and messages are abstract.
"""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from hires.cli.options import JSON, Parser, option
from hires.core.errors import ConfigError, PlanError
from hires.core.store import reading
from hires.plan.proof.comm_program import CommProgram, read_program
from hires.plan.proof.explorer import Exploration, explore, time_line

PARSER = Parser(
    "explore",
    (
        "hires explore crossed.yaml      does it end, whatever the ranks' speeds?",
        "hires explore crossed.yaml --json",
    ),
    option("file", "FILE", "lines of calls by rank, as YAML; see docs/proof.md"),
    JSON,
)


def main(args: Namespace) -> int:
    """Prints the verdict; returns 0 if every interleaving ends, 3 if one does not or sides differ.

    The verdict is that without buffering; a deadlock that only buffers avoid is named.
    """
    try:
        values = reading.read_named_values(args.file)
    except ConfigError as error:
        text = f"{error}; name a file of calls, as `ranks: {{0: [barrier], 1: [barrier]}}`"
        raise ConfigError(text) from None
    try:
        program = read_program(values)
    except ConfigError as error:
        raise ConfigError(f"{args.file}: {error}") from error
    found, buffered = explore(program), explore(program, is_buffered=True)
    if args.json:
        print(json.dumps(_values(found, buffered), indent=2))
    else:
        print("\n".join(_lines(program, found, buffered)))
    return PlanError.exit_code if found.problems else 0


def _lines(program: CommProgram, found: Exploration, buffered: Exploration) -> list[str]:
    num_calls = sum(map(len, program.ranks))
    head = f"{len(program.ranks)} ranks, {num_calls} calls, {found.num_states} states: "
    if not found.problems:
        return [head + "every interleaving ends"]
    lines = [head + _verdict(found, buffered)]
    lines += [f"  {problem}" for problem in found.problems]
    if found.deadlocks:
        lines += ["", "the shortest way there", ""]
        lines += [f"  {line}" for line in time_line(found)]
    return lines


def _verdict(found: Exploration, buffered: Exploration) -> str:
    if not found.deadlocks:
        return "every interleaving ends, but the ranks do not agree"
    if not found.always:
        return "some interleavings deadlock"
    if not buffered.deadlocks:
        return "deadlock, unless every message is buffered; large ones are not"
    return "every interleaving deadlocks"


def _values(found: Exploration, buffered: Exploration) -> dict[str, Any]:
    return {
        "ok": not found.problems,
        "states": found.num_states,
        "problems": found.problems,
        "deadlock": found.deadlocks,
        "always": found.deadlocks and found.always,
        "deadlock_if_buffered": buffered.deadlocks,
        "stuck": {str(rank): text for rank, text in found.stuck.items()},
        "way": [[rank, words] for rank, words in found.steps if words],
    }
