"""``hires plan``: shows the plan of a run without starting anything."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace

from hires.cli.calibration import with_assumed_scales
from hires.cli.compose.compose_config import compose
from hires.cli.compose.idle_keys import idle_keys
from hires.cli.data_keys import with_classes
from hires.cli.options import JSON, Parser, composing, flag
from hires.cli.planning import Planner
from hires.cli.screens.screen import print_config
from hires.cli.screens.show_plan import node_lines, plan_lines
from hires.core.errors import PlanError
from hires.core.units import parse_size
from hires.launcher.interface import launcher_of
from hires.plan.memory import rooms_of
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
    with tempfile.TemporaryDirectory(prefix="hires-plan-") as folder, Planner() as planner:
        config = with_classes(config)
        config, finding = with_assumed_scales(config, planner, args.overrides, folder)
        plan = planner.plan(config)
    plan.findings += [*([finding] if finding else []), *idle_keys(config, args.overrides)]
    facts = plan.to_dict()
    if args.prove:  # a plan that could not be made has no messages, and no verdict
        facts["proofs"] = [v.to_dict(plan) for v in judged(plan)] if plan.verdict else []
    start = launcher_of(config).start_estimate(config) if plan.ok else None
    if start is not None:
        facts[config.launcher.name] = start
    rooms = [room for room in rooms_of(config) if plan.memory and room.counts_nodes]
    for room in rooms:
        facts["gpus" if room.devices else "nodes"] = [
            {"ranks": [node.ranks[0], node.ranks[-1]], "needs_bytes": node.bytes}
            for node in room.per_node(plan)
        ]
    if args.json:
        print(json.dumps(facts))
    else:
        lines = plan_lines(facts, plan.timeline(), parse_size(config.memory.limit))
        for room in rooms:
            place = f"{room.place} beside its GPUs" if room.beside_gpus else room.place
            title = f"memory of a {place}, {'context' if room.devices else 'libraries'} included"
            lines += ["", title, *(f"  {line}" for line in node_lines(room, plan))]
        if start is not None:
            lines += ["", f"{config.launcher.name.capitalize()}: {start}"]
        print("\n".join(lines))
    return 0 if plan.ok else PlanError.exit_code
