"""``hires plan``: show what each rank computes and sends, without running it."""

from __future__ import annotations

import dataclasses
import tempfile
from argparse import Namespace
from typing import Any

from hires.cli.choosing import IMAGE, LayoutSearch, plain_choice
from hires.cli.compose_config import compose
from hires.cli.data_keys import resolve_data
from hires.cli.options import JSON, Parser, composing, flag
from hires.cli.overrides import key_in
from hires.cli.planning import Planner
from hires.cli.prepare import prepare
from hires.cli.screen import plural, print_activity, print_config, print_json
from hires.cli.show_plan import choice_lines, node_lines, plan_lines
from hires.core.config.parallel_config import AUTO
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, PlanError
from hires.core.gradient_orders import AUTO as ANY_ORDER
from hires.core.gradient_orders import ORDERS
from hires.core.schedules import timeline
from hires.core.units import parse_size, seconds
from hires.launcher.interface import launcher_of
from hires.plan.memory import rooms_of
from hires.plan.plan import Plan
from hires.plan.prove import judged
from hires.plan.search.choose import MEMORY
from hires.plan.simulation.machine_calibration import calibration_or_defaults
from hires.plan.simulation.machine_model import machine_of

PARSER = Parser(
    "plan",
    (
        "hires plan parallel=pp image=512",
        "hires plan parallel=sp 'parallel.tiles=[2,2]' --json",
        "hires plan parallel=sp+pp --prove",
        "hires plan --choose ranks=4 memory.limit=4GiB model=resnet50 image=2048 batch=8",
        "hires plan --choose ranks=64 cluster=a100x4 launcher=slurm launcher.nodes=16 image=8192",
        "hires plan --largest ranks=4 memory.limit=4GiB model=unet batch=1",
    ),
    *composing(),
    JSON,
    flag("--choose", "rank the layouts of ``ranks`` ranks that fit, by predicted step time"),
    flag("--largest", "find the largest image that fits ``ranks`` ranks, in image's proportions"),
    flag("--prove", "show the proof of the messages, with the cycle if it fails"),
)


def main(args: Namespace) -> int:
    """Prints a plan as text or as plan.json holds it; returns 3 if it cannot run, else 0."""
    config = compose(_words(args), args.config_dir)
    if args.cfg:
        return print_config(config, args.json)
    with Planner() as planner:
        return (_choose if args.choose or args.largest else _show_plan)(args, config, planner)


def _show_plan(args: Namespace, config: RunConfig, planner: Planner) -> int:
    with tempfile.TemporaryDirectory(prefix="hires-plan-") as folder:
        ready = prepare(config, args.overrides, planner, args.argv, folder)
        config = ready.config
        plan = planner.plan(config, args.argv).with_findings(*ready.findings)
    facts = plan.to_dict()
    if args.prove:  # a plan that could not be made has no messages, and no verdict
        facts["proof"] = judged(plan).to_dict() if plan.verdict else None
    start = launcher_of(config).start_estimate(config) if plan.ok else None
    if start is not None:
        facts[config.launcher.name] = start
    if predicted := _orders(config, plan):
        facts["gradient_orders"] = predicted
    rooms = [room for room in rooms_of(config) if plan.memory and room.counts_nodes]
    for room in rooms:
        facts["gpus" if room.devices else "nodes"] = [
            {"ranks": [node.ranks[0], node.ranks[-1]], "needs_bytes": node.bytes}
            for node in room.per_node(plan)
        ]
    if args.json:
        print_json(facts, None)
    else:
        lines = plan_lines(
            facts, timeline(plan.pipeline, plan.schedule), parse_size(config.memory.limit)
        )
        for room in rooms:
            place = f"{room.place} beside its GPUs" if room.beside_gpus else room.place
            title = f"memory of a {place}, {'context' if room.devices else 'libraries'} included"
            lines += ["", title, *(f"  {line}" for line in node_lines(room, plan))]
        if predicted:
            each = (f"{order} {seconds(step_s)}" for order, step_s in predicted["step_s"].items())
            title = "predicted step by comm.gradient_order"
            lines += ["", title, f"  {', '.join(each)}", f"  by {predicted['source']}"]
        if start is not None:
            lines += ["", f"{config.launcher.name.capitalize()}: {start}"]
        print("\n".join(lines))
    return 0 if plan.ok else PlanError.exit_code


def _orders(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """Returns the predicted seconds of a step in each order of gradient sums, and their source.

    Nothing where the user names none, the plan has no sums or one alone, or the machine no numbers.
    """
    if plan.world == 1 or not plan.training:
        return {}
    if not plan.ok or config.comm.gradient_order == ANY_ORDER or plan.gradients not in ORDERS:
        return {}
    try:
        machine = machine_of(config, calibration_or_defaults())
    except ConfigError:
        return {}
    orders = [name for name, order in ORDERS.items() if plan.outstanding or not order.is_free]
    plans = {order: dataclasses.replace(plan, gradients=order) for order in orders}
    step_s = {order: machine.step_time(one).step_s for order, one in plans.items()}
    return {"step_s": step_s, "source": machine.source}


def _words(args: Namespace) -> list[str]:
    """Returns the overrides, with an open layout where one is to be chosen."""
    given = {*map(key_in, args.overrides)}
    is_open = (args.choose or args.largest) and "parallel" not in given
    return [*args.overrides, *([f"parallel={AUTO}"] if is_open else [])]


def _choose(args: Namespace, config: RunConfig, planner: Planner) -> int:
    """Prints the layouts of a number of ranks, or the largest image that fits them."""
    if args.prove:
        raise ConfigError("--prove shows the proof of one layout; leave --choose and --largest out")
    objective = config.parallel.objective
    if args.largest and (args.choose or objective == MEMORY):
        other = "--choose" if args.choose else f"parallel.objective={MEMORY}"
        raise ConfigError(f"{other} ranks layouts of one size, --largest looks for a size; use one")
    if objective == IMAGE and not args.largest:
        raise ConfigError(f"parallel.objective={IMAGE} looks for a size; use --largest")
    config = resolve_data(config)
    search = LayoutSearch(planner, tuple(args.overrides))
    config, choice = search.largest(config) if args.largest else (config, search.choose(config))
    print_activity("")
    if args.json:
        print_json({**plain_choice(choice), "image": [config.height, config.width]}, None)
        return 0
    if args.largest:
        where = plural(choice.ranks, "rank")
        print(f"Largest image that fits {where}: {config.height}x{config.width}")
        if choice.refused:
            print(f"larger ones that were tried are refused: {choice.refused}")
        print()
    print("\n".join(choice_lines(choice)))
    return 0
