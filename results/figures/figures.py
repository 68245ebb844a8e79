"""Puts predicted and measured points of a published figure beside the numbers of its text.

    python results/figures/figures.py 2.4                           predicted at published sizes
    hires sweep experiment=fig2.4 model.n=1 image=64,96,128 batch=2 what this machine can measure
    python results/figures/figures.py 2.4 results/fig2.4 --out DIR  and beside them
    python results/figures/figures.py table2.2 results/table2.2      accuracies beside Table 2.2

Every point of ``conf/experiment`` is planned on one A100 of 40 GB for each rank, and simulated on
two of them in a node. Their arithmetic is as fast as Table 2.1 says for the precision: a predicted
ratio shows what size, tiles and messages change in the ratio of that table.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from hires.cli.calibration import with_assumed_scales
from hires.cli.compose.choices import groups
from hires.cli.compose.compose_config import Composer
from hires.cli.data_keys import with_classes
from hires.cli.planning import Planner
from hires.cli.sweep.axes import axes_of, stored_sweep
from hires.cli.sweep.sweep_points import Where, compose_all
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.store.naming import model_label
from hires.core.units import GIB
from hires.plan.plan import Plan
from hires.plan.simulation.costs import Device, Roofline
from hires.plan.simulation.simulate import Link, Network, simulate
from hires.report import load

PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
MACHINE = PUBLISHED["machine"]
NEAR, FAR = (Link(**MACHINE[name]) for name in ("near", "far"))
POINT = ["source", "model", "image", "batch", "layout", "tiles", "ranks", "precision"]


def device_of(flops_per_s: float) -> Device:
    """Returns a GPU whose arithmetic has a speed."""
    return Device(flops_per_s, MACHINE["memory"], MACHINE["launch_s"])


def fitted(plan: Plan, step_s: float) -> Device:
    """Returns the GPU on which a step of the plan takes ``step_s``, by bisection."""
    low, high = 1e9, 1e18
    if simulate(plan, Roofline(plan, device_of(high))).step_s > step_s:
        raise ValueError(f"reading and writing maps alone takes longer than {step_s:g} s")
    for _ in range(60):
        middle = math.sqrt(low * high)
        slow = simulate(plan, Roofline(plan, device_of(middle))).step_s > step_s
        low, high = (middle, high) if slow else (low, middle)
    return device_of(high)


def predicted(sweep: str, words: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yields each point of a stored sweep as it is predicted on the published machine."""
    _, stored = stored_sweep([f"experiment={sweep}"], None)
    composer, where = Composer(), stored.options.get("where")
    axes = axes_of([*stored.words, *words], stored.options.get("zip", []), groups())
    points = compose_all(axes, composer, where and Where(where, groups()))
    devices: dict[str, Device] = {}
    with Planner() as planner, tempfile.TemporaryDirectory() as folder:

        def planned(config: RunConfig, words: Sequence[str]) -> Plan:
            gpus = replace(
                config.cluster,
                gpus=config.parallel.num_ranks,
                gpu_memory=f"{MACHINE['gpu_gib']}GiB",
            )
            # Messages go through the host, as those of MPI do; scales of int8 are any.
            comm = replace(config.comm, backend="gloo")
            quant = replace(config.quant, calibration="data")
            config = replace(config, device="cuda", cluster=gpus, comm=comm, quant=quant)
            scales = tempfile.mkdtemp(dir=folder)
            config, *_ = with_assumed_scales(config, planner, words, scales)
            plan = planner.plan(config, memory=False)
            plan.require_ok()
            planner.add_memory(config, plan)
            return plan

        for point in points.valid:
            config = with_classes(point.ready, planner.sizes)
            precision = config.precision.name
            if precision not in devices:
                values = {**PUBLISHED["table_2_1_run"], "precision": {"name": precision}}
                single = replace(from_dict(values), engine=config.engine)
                speed = PUBLISHED["table_2_1"][precision][1]
                devices[precision] = fitted(planned(single, []), single.batch / speed)
            plan = planned(config, point.words)
            network = Network(NEAR, FAR, MACHINE["ranks_per_node"])
            step_s = simulate(plan, Roofline(plan, devices[precision]), network).step_s
            each = [entry["device_bytes"] for entry in plan.memory] * plan.num_replicas
            yield {
                **place("predicted", config),
                "img_per_s": config.batch / step_s,
                "gb": sum(each) / 1e9,
                "fits": max(each) <= MACHINE["gpu_gib"] * GIB,
            }


def measured(runs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the point of each run that is done, by the median of its attempts."""
    frames = load(runs)
    speeds = frames.points.set_index(["campaign", "run"])["img_per_s_median"]
    peaks = frames.memory.groupby(["campaign", "run"])["peak_bytes"].sum() / 1e9
    for run in frames.run_list:
        key = run.campaign, run.name
        if key in speeds.index:
            row = place("measured", from_dict(run.config))
            yield {**row, "img_per_s": speeds[key], "gb": peaks.get(key), "fits": True}


def place(source: str, config: RunConfig) -> dict[str, Any]:
    """Returns what a point is."""
    parallel, size = config.parallel, f"{config.height}x{config.width}"
    tiles = math.prod(parallel.grids[0])
    values = source, model_label(config.model), size, config.batch, parallel.label, tiles
    return dict(zip(POINT, [*values, parallel.num_ranks, config.precision.name], strict=True))


def with_ratios(points: pd.DataFrame) -> pd.DataFrame:
    """Returns points with what they gain over fp32, all else alike, and over one GPU."""

    def base(of: Callable[[pd.DataFrame], pd.Series], keys: list[str]) -> pd.DataFrame:
        bases = points[of(points)].drop_duplicates(keys).set_index(keys)[["img_per_s", "gb"]]
        return points[keys].join(bases, on=keys)

    exact = base(lambda rows: rows["precision"] == "fp32", POINT[:-1])
    single = base(lambda rows: rows["ranks"] == 1, ["source", "model", "image", "batch", POINT[-1]])
    return points.assign(
        **{
            "speed": points["img_per_s"] / exact["img_per_s"],
            "memory": exact["gb"] / points["gb"],
            "speed over one GPU": points["img_per_s"] / single["img_per_s"],
        }
    )


def compared(figure: str, points: pd.DataFrame) -> pd.DataFrame:
    """Returns each number of the text beside what the predicted and measured points come to."""
    rows = []
    for number in (one for one in PUBLISHED["numbers"] if one["figure"] == figure):
        of = points[points["precision"] == number["precision"]]
        if "image" in number:
            of = of[of["image"] == "{0}x{0}".format(number["image"])]
        if "tiles" in number:
            of = of[of["tiles"] == number["tiles"]]
        for layout, part in of.groupby("layout") if "tiles" in number else [("all", of)]:
            ours = part.groupby("source")[number["what"]].agg(number["how"])
            rows.append({**number, "layout": layout, **ours})
    return pd.DataFrame(rows)


def main() -> None:
    """Prints the tables of a figure; with ``--out`` writes them as CSV, and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("figure", choices=[*PUBLISHED["figures"], "table2.2"])
    parser.add_argument("runs", nargs="*", help="run folders, campaigns or patterns of them")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the predicted points")
    args = parser.parse_args()
    if args.figure == "table2.2":
        rows = load(args.runs).evaluations
        table = PUBLISHED["table_2_2"]
        names = [str(data).partition(",")[0] for data in rows["data"]]
        values = [table.get(n, {}).get(p) for n, p in zip(names, rows["precision"], strict=True)]
        print(rows[["data", "precision", "top1"]].assign(published=values).to_string(index=False))
        return
    figure = PUBLISHED["figures"][args.figure]
    rows = [*predicted(figure["sweep"], args.set), *(measured(args.runs) if args.runs else [])]
    points = with_ratios(pd.DataFrame(rows).query(figure.get("keep", "ranks > 0")))
    beside = compared(args.figure, points)
    print(f"Figure {args.figure}: {figure['title']}\n")
    for table in (points, beside):
        print(table.round(2).to_string(index=False), end="\n\n")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        points.to_csv(args.out / f"figure{args.figure}.csv", index=False)
        beside.to_csv(args.out / f"figure{args.figure}-published.csv", index=False)
        names = ["source", "image", "layout", "tiles"]
        bars = points.pivot_table(figure["shows"], names, "precision", sort=False)
        drawn = bars.plot.barh(ylabel="", xlabel=figure["shows"], title=figure["title"])
        drawn.figure.savefig(args.out / f"figure{args.figure}.svg", bbox_inches="tight")


if __name__ == "__main__":
    main()
