"""Puts predicted and measured points of a published figure beside the numbers of its text.

    python results/figures/figures.py 2.4                           predicted at published sizes
    hires sweep experiment=fig2.4 model.depth=11 image=64,96 batch=2 what this machine measures
    python results/figures/figures.py 2.4 results/fig2.4 --out DIR  and beside them
    python results/figures/figures.py table2.2 results/table2.2      accuracies beside Table 2.2
    python results/figures/figures.py edsr                           EDSR on 1 to 512 V100
    python results/figures/figures.py dag                            orders of gradient sums
    python results/figures/figures.py 4.1                            libraries; 4.2 to 4.4, poster
    python results/figures/figures.py broadcast                      chains of codes
    python results/figures/figures.py lr                             a larger batch and rate
    python results/figures/figures.py dag results/dag --record       keeps runs in measured.csv
    python results/figures/figures.py all --out build/figures        all of them

Every point of chapters 2 and 3 is planned on one A100 of 40 GB for each rank, and simulated on
two of them in a node. Their arithmetic is as fast as Table 2.1 says for the precision: a predicted
ratio shows what size, tiles and messages change in the ratio of that table.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from measured_here import PUBLISHED, chains, draw_measured, keep, kept, libraries, mixing, recorded

from hires.cli.axes import axes_of, stored_sweep
from hires.cli.choices import groups
from hires.cli.compose_config import Composer
from hires.cli.planning import Planner
from hires.cli.prepare import prepare
from hires.cli.sweep_points import Where, compose_all
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import HiresError
from hires.core.gradient_orders import ORDERS
from hires.core.store.naming import model_label
from hires.core.units import GIB
from hires.plan import updates
from hires.plan.plan import Plan
from hires.plan.simulation.costs import Device, Roofline
from hires.plan.simulation.machine_calibration import DEFAULTS
from hires.plan.simulation.machine_model import LAUNCH_S, machine_of
from hires.plan.simulation.simulate import Link, Network, simulate
from hires.report import load

MACHINE = PUBLISHED["machine"]
A100 = Device(0.0, MACHINE["memory"], MACHINE["launch_s"])
NETWORK = Network(Link(**MACHINE["near"]), Link(**MACHINE["far"]))
POINT = ["source", "model", "image", "batch", "layout", "tiles", "ranks", "precision"]


def step_s(
    plan: Plan, flops_per_s: float, network: Network | None = None, device: Device = A100
) -> float:
    """Returns the predicted step of a plan on GPUs whose arithmetic has a speed."""
    costs = Roofline(plan, replace(device, flops_per_s=flops_per_s))
    return simulate(plan, costs, *([network] if network else [])).step_s


def fitted(plan: Plan, seconds: float, device: Device = A100) -> float:
    """Returns the speed with which a step of the plan takes so many seconds, by bisection."""
    low, high = 1e9, 1e18
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (
            (middle, high) if step_s(plan, middle, None, device) > seconds else (low, middle)
        )
    if low > 1e17:
        raise ValueError(f"reading and writing maps alone takes longer than {seconds:g} s")
    return high


def planned(config: RunConfig, words: Sequence[str], planner: Planner, folder: str) -> Plan:
    """Returns the plan on the published machine; messages go through the host, as MPI's do."""
    gpus, memory = config.parallel.num_ranks, f"{MACHINE['gpu_gib']}GiB"
    cluster = replace(config.cluster, gpus=gpus, gpu_memory=memory)
    config = replace(config, device="cuda", cluster=cluster)
    config = replace(config, comm=replace(config.comm, backend="gloo"))
    config = replace(config, quant=replace(config.quant, calibration="data"))  # scales are any
    config = prepare(config, words, planner, (), tempfile.mkdtemp(dir=folder)).config
    plan = planner.plan(config, memory=False)
    plan.require_ok()
    return planner.with_memory(config, plan)


def predicted(sweep: str, words: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yields each point of a stored sweep as it is predicted on the published machine."""
    _, stored = stored_sweep([f"experiment={sweep}"], None)
    where = stored.options.get("where")
    axes = axes_of([*stored.words, *words], stored.options.get("zip", []), groups())
    points = compose_all(axes, Composer(), where and Where(where, groups()))
    speeds: dict[str, float] = {}
    with Planner() as planner, tempfile.TemporaryDirectory() as folder:
        for point in points.valid:
            assert point.config is not None
            config = point.config
            precision = config.precision.name
            if precision not in speeds:
                values = {**PUBLISHED["table_2_1_run"], "precision": {"name": precision}}
                single = replace(from_dict(values), engine=config.engine)
                seconds = single.batch / PUBLISHED["table_2_1"][precision][1]
                speeds[precision] = fitted(planned(single, [], planner, folder), seconds)
            plan = planned(config, point.words, planner, folder)
            each = [entry["device_bytes"] for entry in plan.memory] * plan.num_replicas
            of_node = MACHINE["ranks_per_node"]
            network = replace(NETWORK, node_starts=tuple(range(of_node, plan.world, of_node)))
            img_per_s = config.batch / step_s(plan, speeds[precision], network)
            fits = max(each) <= MACHINE["gpu_gib"] * GIB
            place = place_of("predicted", config)
            yield {**place, "img_per_s": img_per_s, "gb": sum(each) / 1e9, "fits": fits}


def scaling(words: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yields images/s of EDSR by library and GPUs, as ``cluster=mvapich_v100x4`` predicts them.

    Its link has the speed at which the all-reduces of the profile pass four GPUs (of NCCL, for
    which there is no profile: that of NVLink), and its arithmetic that of the published GPU. Sums
    are beside the backward pass, or at its end.
    """
    text, kinds = PUBLISHED["edsr"], {"at the end": "end", "beside": "chain"}
    plans = {
        (gpus, when): pair
        for when, order in kinds.items()
        for gpus, pair in on_v100(text, [*words, f"comm.gradient_order={order}"]).items()
    }
    config, single = plans[1, "at the end"]
    site_memory = (config.cluster.memory_gb_per_s or math.inf) * 1e9
    gpu = Device(0.0, site_memory, LAUNCH_S)
    rate = fitted(single, config.batch / text["one_gpu"], gpu)
    gradients = 4 * sum(stage.params for stage in single.stages)
    ranks, steps = text["assumed"]["gpus"], text["assumed"]["steps"]
    for library, published in text["img_per_s"].items():
        keys = {"tflop_per_s": {"fp32": rate / 1e12}, "network_gb_per_s": text["network_gb_per_s"]}
        if times := text["all_reduce_ms"].get(library):
            passed = 2 * (ranks - 1) / ranks * gradients * steps
            keys["link_gb_per_s"] = passed / sum(times) / 1e6
        values = dict(zip(text["gpus"], published, strict=True))
        for gpus in sorted({gpus for gpus, _ in plans}):
            value = values[gpus]
            row: dict[str, Any] = {"library": library, "GPUs": gpus, "published": value}
            for when in ("at the end", "beside"):
                config, plan = plans[gpus, when]
                config = replace(config, cluster=replace(config.cluster, **keys))
                ours = config.batch / machine_of(config, DEFAULTS).step_time(plan).step_s
                row |= {when: ours, f"off by, {when}": max(ours / value, value / ours)}
            yield {**row, "link [GB/s]": config.cluster.link_gb_per_s}


def on_v100(text: dict[str, Any], words: Sequence[str]) -> dict[int, tuple[RunConfig, Plan]]:
    """Returns by GPUs the points of a sweep on ``cluster=mvapich_v100x4``, and their plans."""
    _, stored = stored_sweep([f"experiment={text['sweep']}"], None)
    site = ["cluster=mvapich_v100x4", "launcher=slurm", "launcher.max_ranks=512", "device=cuda"]
    site.append("comm.backend=gloo")  # through the host
    axes = axes_of([*stored.words, *site, *words], stored.options["zip"], groups())
    plans: dict[int, tuple[RunConfig, Plan]] = {}
    with Planner() as planner:
        for config in (one.config for one in compose_all(axes, Composer(), None).valid):
            assert config is not None
            gpus = config.parallel.num_ranks
            nodes = -(-gpus // text["gpus_of_node"])
            config = replace(config, launcher=replace(config.launcher, nodes=nodes))
            config = prepare(config, [], planner, ()).config
            plans[gpus] = config, planner.plan(config, memory=False)
    return plans


def orders(words: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yields milliseconds of a step by order of gradient sums, GPUs and speed of the sums.

    The text has no speed of its all-reduces through the host; several are tried. ``all alone``:
    every gradient is a sum of its own, as every key there, not those from 1 MiB on.
    """
    text, limit = PUBLISHED["dag"], updates.ALONE_BYTES
    for sums, least in {"from 1 MiB": limit, "all alone": 4}.items():
        updates.ALONE_BYTES = least
        plans = {order: on_v100(text, [*words, f"comm.gradient_order={order}"]) for order in ORDERS}
        for gpus, speed in itertools.product(plans["end"], text["all_reduce_gb_per_s"]):
            row: dict[str, Any] = {"sums": sums, "GPUs": gpus, "GB/s": speed}
            for order, points in plans.items():
                config, plan = points[gpus]
                speeds = dict.fromkeys(("network_gb_per_s", "link_gb_per_s"), speed)
                config = replace(config, cluster=replace(config.cluster, **text["gpu"], **speeds))
                row[order] = 1e3 * machine_of(config, DEFAULTS).step_time(plan).step_s
            for order in ("funnel", "end"):
                row[f"{order} over chain"] = row[order] / row["chain"]
            yield {**row, "published": text["funnel_over_chain"]}
    updates.ALONE_BYTES = limit


def measured(runs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the point of each run that is done, by the median of its attempts."""
    frames = load(runs)
    speeds = frames.points.set_index(["campaign", "run"])["img_per_s_median"]
    peaks = frames.memory.groupby(["campaign", "run"])["peak_bytes"].sum() / 1e9
    for run in frames.run_list:
        if (key := (run.campaign, run.name)) in speeds.index:
            place = place_of("measured", from_dict(run.config))
            yield {**place, "img_per_s": speeds[key], "gb": peaks.get(key), "fits": True}


def place_of(source: str, config: RunConfig) -> dict[str, Any]:
    """Returns what a point is."""
    parallel, size = config.parallel, f"{config.height}x{config.width}"
    values = source, model_label(config.model), size, config.batch, parallel.label
    tiles = math.prod(parallel.grids[0]), parallel.num_ranks, config.precision.name
    return dict(zip(POINT, [*values, *tiles], strict=True))


def with_ratios(points: pd.DataFrame, base_layout: str = "") -> pd.DataFrame:
    """Returns points with what they gain over fp32, all else alike, one GPU and a layout."""

    def base(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
        bases = rows.drop_duplicates(keys).set_index(keys)[["img_per_s", "gb"]]
        return points[keys].join(bases, on=keys)

    exact = base(points[points["precision"] == "fp32"], POINT[:-1])
    single = base(points[points["ranks"] == 1], [*POINT[:4], POINT[-1]])
    speed, memory = points["img_per_s"] / exact["img_per_s"], exact["gb"] / points["gb"]
    over = {"speed over one GPU": points["img_per_s"] / single["img_per_s"]}
    if base_layout:
        other = base(points[points["layout"] == base_layout], [*POINT[:4], POINT[-1]])
        over["speed over the base"] = points["img_per_s"] / other["img_per_s"]
    return points.assign(speed=speed, memory=memory, **over)


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


def tables_of(name: str, runs: Sequence[str], words: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Returns the tables of a figure by how their files end; the first one is drawn."""
    if name == "table2.2":
        rows, table = load(runs).evaluations, PUBLISHED["table_2_2"]
        names = [str(data).partition(",")[0] for data in rows["data"]]
        values = [table.get(n, {}).get(p) for n, p in zip(names, rows["precision"], strict=True)]
        return {"": rows[["data", "precision", "top1"]].assign(published=values)}
    here = {"-measured": kept(name)} if name in PUBLISHED["measured"] else {}
    if name in ("edsr", "dag"):
        return {"": pd.DataFrame((scaling if name == "edsr" else orders)(words)), **here}
    if name in PUBLISHED["libraries"]:
        return {"": mixing() if name == "poster" else libraries(name)}
    if name in ("broadcast", "lr"):
        return {"": chains(), **here} if name == "broadcast" else {"": here["-measured"]}
    figure = PUBLISHED["figures"][name]
    rows = [*predicted(figure["sweep"], words), *(measured(runs) if runs else [])]
    shown = pd.DataFrame(rows).query(figure.get("keep", "ranks > 0"))
    points = with_ratios(shown, figure.get("base", ""))
    return {"": points, "-published": compared(name, points), **here}


def draw(name: str, points: pd.DataFrame, path: Path) -> None:
    """Draws a figure: predicted, measured here, and below them what is published."""
    has_runs = name in PUBLISHED["measured"]
    panels = {"edsr": 3, "lr": 0}.get(name, 1) + has_runs
    figure, axes = plt.subplots(
        1, panels, figsize=(5 * panels, 4), squeeze=False, layout="constrained"
    )
    axis, bars = axes[0][0], {"ylabel": "", "ax": axes[0][0]}
    if name == "dag":
        some = points[points["GPUs"] == max(points["GPUs"])].set_index(["sums", "GB/s"])
        title = f"predicted: Inception-BN on {max(points['GPUs'])} GPUs"
        some[[*ORDERS]].plot.barh(xlabel="step [ms]", title=title, **bars)
    elif name == "edsr":
        lines = {"published": "published", "at the end": "sums at the end", "beside": "sums beside"}
        single = PUBLISHED["edsr"]["one_gpu"] * points["GPUs"]
        shares = points[["library", "GPUs"]].join(100 * points[[*lines]].div(single, axis=0))
        for panel, (library, part) in zip(axes[0], shares.groupby("library"), strict=False):
            part.rename(columns=lines).plot("GPUs", [*lines.values()], ax=panel, style=".-")
            panel.set_xscale("log", base=2)
            panel.set(title=f"EDSR, {library}: published, predicted", ylim=(0, 105))
            panel.set(ylabel="speed of a GPU, of a single one [%]")
    elif name == "poster":
        title = "measured here: communication alone, mean of all cells"
        points.set_index("table")[["gain"]].plot.barh(xlabel="gain", title=title, **bars)
    elif name in PUBLISHED["libraries"]:
        title = f"measured here: {PUBLISHED['libraries'][name]['operation']}"
        points.rename_axis(columns=None).plot(
            "bytes", ["gloo", "mpi", "shm"], loglog=True, style=".-", ax=axis
        )
        axis.set(ylabel="us", title=title)
    elif name == "broadcast":
        title = "measured here, and published: 64 MiB"
        points.set_index(["on", "codec"]).plot.barh(xlabel="saved [%]", title=title, **bars)
    elif name != "lr":
        text, names = PUBLISHED["figures"][name], ["source", "image", "layout", "tiles"]
        table = points.pivot_table(text["shows"], names, "precision", sort=False)
        table.index = [", ".join(map(str, place)) for place in table.index]
        unit = {"img_per_s": "img/s", "gb": "GB, all GPUs"}[text["shows"]]
        table.plot.barh(xlabel=unit, title=text["title"], **bars)
    if has_runs:
        draw_measured(name, kept(name), axes[0][-1])
    numbers = [one for one in PUBLISHED["numbers"] if one["figure"] == name]
    words = [f"{one['precision']} {one['what']}, {one['how']}: {one['value']}" for one in numbers]
    said = "; ".join(words) or PUBLISHED["said"].get(name, "no number")
    figure.text(0.5, -0.05, f"published: {said}", ha="center")
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    """Prints the tables of a figure; with ``--out`` writes them as CSV, and a plot."""
    every = [*PUBLISHED["figures"], *PUBLISHED["libraries"], "broadcast", "edsr", "dag", "lr"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("figure", choices=[*every, "table2.2", "all"])
    parser.add_argument("runs", nargs="*", help="run folders, campaigns or patterns of them")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the predicted points")
    parser.add_argument("--record", action="store_true", help="keep the runs in measured.csv")
    args = parser.parse_args()
    if args.record:
        if args.figure not in PUBLISHED["measured"]:
            parser.error(f"--record keeps runs of {', '.join(PUBLISHED['measured'])}")
        keep(args.figure, [*recorded(args.figure, args.runs)])
        return
    for name in every if args.figure == "all" else [args.figure]:
        print(f"{name}: {PUBLISHED['figures'].get(name, {}).get('title', '')}\n")
        for end, table in (tables := tables_of(name, args.runs, args.set)).items():
            print(table.round(3).to_string(index=False), end="\n\n", flush=True)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                table.to_csv(args.out / f"figure{name}{end}.csv", index=False)
        if args.out and name != "table2.2":
            draw(name, tables[""], args.out / f"figure{name}.svg")


if __name__ == "__main__":
    try:
        main()
    except HiresError as error:
        raise SystemExit(str(error)) from None
