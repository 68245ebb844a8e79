"""Runs of a network on this machine refine its predictions; others and damaged ones do not."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hires.core.config.run_config import from_dict
from hires.core.ranks.timeline import FILE, HostClock, MarkedSpan, Recorder
from hires.core.store.naming import plain
from hires.plan.simulation.calibrated_device import Factors
from hires.plan.simulation.costs import Roofline
from hires.plan.simulation.machine_calibration import DEFAULTS, Overheads
from hires.plan.simulation.machine_model import MachineModel
from hires.plan.simulation.run_factors import refined
from hires.plan.simulation.simulate import simulate
from tests.helpers.calibrations import CALIBRATION
from tests.helpers.small_plans import LAYOUTS, plan_of

QUICK = dataclasses.replace(CALIBRATION, overheads=Overheads(1e-5, 0.0, 0.0, 1e6))


CONFIG = {"image": 16, "batch": 8, "model": {"name": "unet"}}


SLOWER = Factors(1.25, 1.5, 0.75)


class StoppedClock(HostClock):
    """A clock on which every step begins at 0."""

    def now(self):
        return 0.0


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A results folder; call it to add a run that was slower than predicted, by some factors."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HIRES_CACHE", raising=False)
    count = iter(range(100))

    def add(factors: Factors = SLOWER, state: str = "done", **other: object):
        run = tmp_path / "campaign" / f"run{next(count)}"
        (run / "a0").mkdir(parents=True)
        plan = plan_of(**LAYOUTS["pp"])
        (run / "plan.json").write_text(json.dumps(plan.to_dict()))
        network = QUICK.links.network()
        machine = MachineModel("", network, QUICK, factors=factors, cores=QUICK.machine.cores)
        for line in simulate(plan, Roofline(plan, machine.speed_of(plan))).ranks:
            recorder = Recorder()
            recorder.clock = StoppedClock()
            recorder.begin_step()
            recorder.steps[-1].spans.extend(MarkedSpan(*span[:5]) for span in line.spans)
            recorder.write(run / "a0", line.rank)
        hardware = {"cpu": QUICK.machine.cpu, "cores": QUICK.machine.cores}
        made = {"torch": QUICK.machine.torch, "hires": QUICK.machine.hires, "hardware": hardware}
        config = {**plain(from_dict({**CONFIG, **other})), "device": "cpu"}
        line = {"schema": 1, "campaign": "campaign", "run": run.name, "attempt": 0}
        line |= {"exit": {"state": state}, "config": config, "record": {"provenance": made}}
        with (tmp_path / "index.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return run

    add.folder = tmp_path
    return add


def found(results, **config: object) -> Factors:
    return refined(QUICK, from_dict({**CONFIG, **config}), results.folder)


def test_factors_of_several_runs_are_medians(results):
    for factor in (0.75, 1.25, 1.75):
        results(Factors(factor, factor, factor))
    assert found(results).forward == pytest.approx(1.25, rel=1e-2)


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"name": "unet", "width": 32}},
        {"precision": {"name": "bf16"}},
        {"task": {"name": "infer"}},
        {"launcher": {"threads": 2}},
    ],
)
def test_runs_of_another_network_precision_or_task_do_not_count(results, other):
    results(**other)
    assert found(results) == Factors()


def test_runs_that_failed_or_of_another_machine_do_not_count(results, monkeypatch):
    results(state="failed")
    assert found(results) == Factors()
    results()
    other = QUICK.machine._replace(cpu="another")
    elsewhere = dataclasses.replace(QUICK, machine=other)
    assert refined(elsewhere, from_dict(CONFIG), results.folder) == Factors()
    assert refined(DEFAULTS, from_dict(CONFIG), results.folder) == Factors()


@pytest.mark.parametrize(("name", "text"), [("plan.json", "{"), (f"a0/{FILE}", "[1]")])
def test_damaged_folder_is_left_out(results, name, text):
    run = results()
    (run / name).write_text(text)
    assert found(results) == Factors()
    results()
    assert found(results).forward == pytest.approx(1.25, rel=1e-2)
