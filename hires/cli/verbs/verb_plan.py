"""``hires plan``: shows the plan of a run without starting anything."""

from __future__ import annotations

import json
from argparse import Namespace

from hires.cli.compose.compose_config import compose
from hires.cli.options import JSON, Parser, composing, flag
from hires.cli.planning import planned, with_classes
from hires.cli.screens.screen import print_config
from hires.cli.screens.show_plan import node_lines, plan_lines
from hires.core.errors import PlanError
from hires.core.units import parse_size
from hires.launcher.interface import launcher_of
from hires.plan.memory import room_of
from hires.plan.proof.prove import judged

PARSER = Parser(
    "plan",
    (
        "hires plan parallel=pp image=512",
        "hires plan parallel=sp 'parallel.tiles=[2,2]' --json",
        "hires plan parallel=sp+pp --prove",
    ),
    *composing(),
    JSON,
    flag("--prove", "show the proof under each semantics of messages, with the cycle if it fails"),
)


def main(args: Namespace) -> int:
    """Prints a plan as text or as plan.json holds it; returns 3 if it cannot run, else 0."""
    config = compose(args.overrides, args.config_dir)
    if args.cfg:
        return print_config(config)
    plan = planned(with_classes(config))
    facts = plan.to_dict()
    if args.prove:  # a plan that could not be made has no messages, and no verdict
        facts["proofs"] = [v.to_dict(plan) for v in judged(plan)] if plan.verdict else []
    start = launcher_of(config).start_estimate(config) if plan.ok else None
    if start is not None:
        facts[config.launcher.name] = start
    room = room_of(config)
    if plan.memory and room.counts_nodes:
        facts["gpus" if room.devices else "nodes"] = [
            {"ranks": [node.ranks[0], node.ranks[-1]], "needs_bytes": node.bytes}
            for node in room.per_node(plan)
        ]
    if args.json:
        print(json.dumps(facts))
    else:
        lines = plan_lines(facts, plan.timeline(), parse_size(config.memory.limit))
        nodes = node_lines(room, plan)
        if nodes:
            title = (
                f"memory of a {room.place}, {'context' if room.devices else 'libraries'} included"
            )
            lines += ["", title, *(f"  {line}" for line in nodes)]
        if start is not None:
            lines += ["", f"{config.launcher.name.capitalize()}: {start}"]
        print("\n".join(lines))
    return 0 if plan.ok else PlanError.exit_code
