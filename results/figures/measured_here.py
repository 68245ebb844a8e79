"""What runs and benchmarks of this machine measured, for the figures beside it: rows of a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from hires.core.gradient_orders import ORDERS
from hires.report import load

PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
MEASURED = Path(__file__).with_name("measured.csv")
"""Real runs of this machine, which ``--record`` has kept: they are drawn beside the predicted."""
PAGES = Path(__file__).resolve().parents[1] / "comm"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
LIBRARIES = ["gloo", "mpi", "shm"]
CLASSES = {17: "up to 128 KiB", 24: "to 16 MiB", 25: "to 32 MiB", 99: "from 32 MiB"}
"""Sizes of messages in the profile of EDSR: the power of two below which each class is."""


def recorded(name: str, runs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields what runs say of a figure: a row, a column, the median, p10 and p90, and samples."""
    frames, text = load(runs), PUBLISHED["measured"][name]
    if name == "edsr":
        for order, part in sums_by_class(frames):
            for size, share in part.items():
                yield {"row": size, "column": order, "median": share}
        return
    configs = {(run.campaign, run.name): run.flat_config for run in frames.run_list}
    for row in frames.validations.to_dict("records") if name == "lr" else ():
        config = configs[row["campaign"], row["run"]]
        column = f"rate {config['optimizer.lr']}, batch {config['batch']}"
        images = row["done"] * config["batch"]
        ends = {"median": row["top1"], "p10": row["top1_low"], "p90": row["top1_high"]}
        yield {"row": images, "column": column, **ends, "n": row["images"]}
    steps = frames.samples[frames.samples["counted"].astype(bool)].groupby(["campaign", "run"])
    for row in frames.runs.to_dict("records") if name != "lr" else ():
        if row["state"] == "done":
            facts = configs[key := (row["campaign"], row["run"])] | row
            times = steps.get_group(key)["step_s"].astype(float)  # of all attempts
            values = facts["batch"] / times if text["unit"] == "img/s" else times
            ends = {"median": values.median(), "p10": values.quantile(0.1)}
            ends |= {"p90": values.quantile(0.9), "n": len(values)}
            column = next((str(facts[key]) for key in text["column"] if facts.get(key)), "none")
            yield {"row": ", ".join(str(facts[k]) for k in text["row"]), "column": column, **ends}


def sums_by_class(frames: Any) -> Iterator[tuple[str, pd.Series]]:
    """Yields the share of each class of sizes in the bytes of sums [%], by order of the sums."""
    orders_of = {run.name: run.flat_config["comm.gradient_order"] for run in frames.run_list}
    sums = frames.messages[frames.messages["kind"] == "gradient"]
    for name, part in sums.groupby("run"):
        powers = part["least_bytes"].clip(lower=1).map(math.log2)
        classes = [next(text for end, text in CLASSES.items() if p < end) for p in powers]
        shares = 100 * part["bytes_per_step"].groupby(classes).sum() / part["bytes_per_step"].sum()
        yield f"here, {orders_of[name]}", shares.reindex([*CLASSES.values()], fill_value=0)


def kept(name: str) -> pd.DataFrame:
    """Returns the rows of a figure in ``measured.csv``."""
    rows = pd.read_csv(MEASURED, dtype={"figure": str, "row": str})
    return rows[rows["figure"] == name].drop(columns="figure")


def keep(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes the rows of a figure to ``measured.csv``, in place of those there."""
    every = pd.read_csv(MEASURED, dtype={"figure": str, "row": str})
    every = every[every["figure"] != name]
    names = ["row", "column", "median", "p10", "p90", "n"]
    table = pd.DataFrame(rows).reindex(columns=names).sort_values(["row", "column"], kind="stable")
    table = table.drop_duplicates()
    table.insert(0, "figure", name)
    table[names[2:5]] = table[names[2:5]].astype(float)
    every = pd.concat([every, table]) if len(every) else table
    every.to_csv(MEASURED, index=False, float_format="%.5g")


def page(name: str) -> pd.DataFrame:
    """Returns title, bytes, way, median, p10 and p90 of a page of ``hires bench comm``."""
    rows: list[dict[str, Any]] = []
    title, heads = "", list[str]()
    for line in (PAGES / name / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("#"):
            title, heads = line.strip("# "), []
        elif line.startswith("| size"):
            heads = cells
        elif heads and cells[0][:1].isdigit():
            number, unit = cells[0].split()
            size = float(number) * 1024 ** ("B", "KiB", "MiB").index(unit)
            for way, cell in zip(heads[1:], cells[1:], strict=True):
                if values := NUMBER.findall(cell):
                    ends = dict(zip(("median", "p10", "p90"), map(float, values), strict=False))
                    rows.append({"title": title, "bytes": int(size), "way": way, **ends})
    return pd.DataFrame(rows)


def libraries(name: str) -> pd.DataFrame:
    """Returns microseconds of an operation by size and library, the fastest, and the text's."""
    text, rows = PUBLISHED["libraries"][name], page("libraries")
    rows = rows[rows["title"].str.startswith(text["operation"])]
    table = rows.pivot_table("median", "bytes", "way")[LIBRARIES]
    table["fastest"] = table.idxmin(axis=1)
    best = text["fastest"].items()
    table["text"] = [next(way for end, way in best if size <= end) for size in table.index]
    return table.reset_index()


def mixing() -> pd.DataFrame:
    """Returns how much faster mixed libraries are than the best single one, mean over all cells."""
    rows = page("libraries")
    rows = rows[rows["way"].isin(LIBRARIES)]
    rows = rows.assign(log=rows["median"].map(math.log))
    logs = rows.pivot_table("log", ["title", "bytes"], "way")
    single = logs.mean().min()
    tables = {
        "a library for each operation (MCR-DL)": logs.groupby("title").mean().min(axis=1).mean(),
        "a library for each size, too (MCR-DL-T)": logs.min(axis=1).mean(),
    }
    gains = {kind: math.exp(single - mean) for kind, mean in tables.items()}
    return pd.DataFrame({"table": gains.keys(), "gain": gains.values()})


def chains() -> pd.DataFrame:
    """Returns by link, ranks and codec what codes save of the time of a broadcast of 64 MiB [%]."""
    text, rows = PUBLISHED["broadcast"], page("broadcast")
    table = rows[rows["bytes"] == text["bytes"]].pivot_table("median", "title", "way")
    chain, shares = text["chain"], []
    for title, times in table.iterrows():
        for codec in ("bf16", "int8"):
            coded = times[f"{chain}+{codec}"]
            others = {"library": "mpi", "chain": chain, "hops": f"{chain}+{codec}@hops"}
            saved = {f"over {what}": 100 * (1 - coded / times[way]) for what, way in others.items()}
            where = str(title).removeprefix("broadcast, float32, ").partition(", ms:")[0]
            shares.append({"on": where, "codec": codec, **saved})
    published = {f"over {what}": value for what, value in text["saved"].items()}
    return pd.DataFrame([*shares, {"on": "published", "codec": "theirs", **published}])


def draw_measured(name: str, rows: pd.DataFrame, axis: Any) -> None:
    """Draws what runs here measured: lines over numbers, else bars, with p10 and p90."""
    text = PUBLISHED["measured"][name]
    if name == "lr":
        for column, part in rows.assign(row=rows["row"].astype(float)).groupby("column"):
            part = part.sort_values("row")
            axis.plot(part["row"], part["median"], ".-", label=column)
            axis.fill_between(part["row"], part["p10"], part["p90"], alpha=0.2)
        axis.set(xlabel="images seen", ylabel=text["unit"], title=text["title"])
        axis.legend()
        return
    wide = rows.pivot_table(["median", "p10", "p90"], "row", "column", sort=False, dropna=False)
    middle, errors = wide["median"], None
    middle = middle[[*ORDERS]] if name == "dag" else middle
    if "p10" in wide and not wide["p10"].isna().all(axis=None):
        errors = [[(middle[c] - wide["p10"][c]), (wide["p90"][c] - middle[c])] for c in middle]
    if name == "edsr":
        times = PUBLISHED["edsr"]["all_reduce_ms"].items()
        text_of = {f"text, {n}": [100 * t / sum(ms) for t in ms] for n, ms in times}
        middle = middle.reindex(CLASSES.values()).join(
            pd.DataFrame(text_of, index=[*CLASSES.values()])
        )
    middle.rename_axis(columns=None).plot.barh(xerr=errors, ylabel="", xlabel=text["unit"], ax=axis)
    axis.set(title=text["title"])
