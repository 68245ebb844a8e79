"""What is a plot, and from what is it drawn?"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hires.core.ranks.timeline import StepSpans, complete_steps
from hires.plan.plan import Plan
from hires.report.frames import Frames
from hires.report.load.machines import places
from hires.report.load.reading import discarded_steps
from hires.report.load.runs import Run
from hires.report.plots import style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SHOWN = 6
"""Runs that are drawn rank by rank."""
DEVICE = "device"
"""What a record says measured the memory of a rank that computed on an accelerator."""
MAX_LABEL = 60
"""Characters of the name by which a run is called in captions."""
MAX_RANKS = 64
"""Ranks of a run that are drawn one by one; more would be thinner than a line."""


@dataclass
class Plot:
    """A figure with what it says, or why there is none."""

    name: str
    """File name without its ending."""
    title: str
    figure: Figure | None = None
    caption: str = ""
    """What it shows, with its numbers."""
    missing: str = ""
    """Why there is none."""
    wide: bool = False
    """Whether it needs the width of a page."""
    setting: str = ""
    """Where it was measured, if that is not where the runs were."""


@dataclass
class Shown:
    """A run that is drawn rank by rank; plan and time line are read when they are asked for."""

    run: Run
    label: str
    """Short, and different from that of the others."""
    layout: str

    @functools.cached_property
    def plan(self) -> Plan | None:
        """Its plan, if it can be read and is not too large to be drawn."""
        plan = self.run.plan()
        return plan if plan is not None and plan.world <= MAX_RANKS else None

    @functools.cached_property
    def steps(self) -> dict[int, list[StepSpans]]:
        """Its measured steps, by number; none if there is no time line."""
        found = self.run.timeline() if self.plan is not None else []
        return complete_steps(found, self.plan.world) if found and self.plan is not None else {}

    @functools.cached_property
    def counted(self) -> dict[int, list[StepSpans]]:
        """Those of its steps that count: neither warm-up nor anything else that was discarded."""
        out = discarded_steps(self.run.record)
        return {number: ranks for number, ranks in self.steps.items() if number not in out}


@dataclass
class Material:
    """Everything that plots are drawn from."""

    frames: Frames
    shown: list[Shown]
    setting: str
    """Where it was measured, said on every figure."""
    benches: Sequence[dict[str, object]] = field(default_factory=list)


def material(frames: Frames) -> Material:
    """Returns what plots of some runs are drawn from."""
    return Material(frames, _shown(frames), setting(frames))


def setting(frames: Frames) -> str:
    """Returns what kind of device was measured, as every figure says it."""
    found = [place for run in frames.held for place in places(run)]
    cores = [place.cores for place in found if place.cores]
    if not cores:
        return "device not recorded"
    each = f"{min(cores)} to {max(cores)} cores" if len(set(cores)) > 1 else f"{cores[0]} cores"
    hosts = len({place.host for place in found})
    sources = set(frames.memory["source"].dropna())
    kinds = ["accelerator"] if DEVICE in sources else []
    kinds += ["CPU"] if sources != {DEVICE} else []
    machine = "1 machine" if hosts == 1 else f"{hosts} machines"
    said = [f"{style.listed(kinds)}, {each}{'' if hosts == 1 else ' each'}, {machine}"]
    crowded = [place.ranks for place in found if place.cores and place.ranks > place.cores]
    if crowded and "CPU" in kinds:
        said.append(f"simulated ranks: up to {max(crowded)} share the cores")
    elif hosts == 1 and max(place.ranks for place in found) > 1:
        said.append("ranks are processes of one machine")
    most = max(place.on_device for place in found)
    if most > 1 and DEVICE in sources:
        said.append(f"up to {most} ranks share one accelerator")
    return "; ".join(said)


def _shown(frames: Frames) -> list[Shown]:
    """Returns what is drawn rank by rank: of each layout one, of one work if possible."""
    runs = frames.runs
    done = runs[runs["state"] == "done"]
    chosen = done if len(done) else runs
    if not len(chosen):
        return []
    kept = chosen.assign(_layout=chosen["layout"].fillna("?"))
    keys = ["campaign", "model", "image", "batch", "task", "precision", "settings"]
    counts = kept.groupby(keys, dropna=False)["_layout"].nunique().rename("_layouts")
    kept = kept.join(counts, on=keys)
    # Runs beside each other should differ in the layout alone, so fp32 wins where it is as common.
    kept["_plain"] = (kept["precision"] == "fp32").fillna(False).astype(int)
    kept["_pixels"] = kept["height"].fillna(0) * kept["width"].fillna(0)
    kept = kept.sort_values(
        ["_layouts", "_plain", "_pixels", "img_per_s_median"], ascending=False, na_position="last"
    )
    rows = kept.drop_duplicates("_layout").head(SHOWN)
    return _labelled(frames, rows)


def _labelled(frames: Frames, rows: pd.DataFrame) -> list[Shown]:
    """Returns the runs of some rows, each with what tells it from the others."""
    extra = [
        key
        for key in ("campaign", "model", "image", "precision", "task")
        if rows[key].nunique(dropna=False) > 1
    ]
    found = []
    for row in rows.to_dict("records"):
        run = frames.run(str(row["campaign"]), str(row["run"]))
        if run is not None:
            label = " ".join([row["_layout"], *(str(row[key]) for key in extra)])
            label = label if len(label) <= MAX_LABEL else f"{label[:MAX_LABEL]}..."
            found.append(Shown(run, label, str(row["_layout"])))
    return found
