"""Searches for layouts of a small network, on a machine with round numbers.

The machine is a roofline, and memory is what a rule says.
"""

from __future__ import annotations

import dataclasses

from hires.core.units import MIB
from hires.plan.memory import RankMemory
from hires.plan.search.choose import Chooser
from hires.plan.simulation.costs import Device
from hires.plan.simulation.machine_model import MachineModel
from hires.plan.simulation.simulate import Link, Network
from tests.helpers.small_plans import config_of, forked

LINK = Link(1e-6, 1e9)
MACHINE = MachineModel("a test", Network(LINK, LINK), device=Device(1e9, 1e9, 1e-6))
LONG_S = 600.0
SHORT_S = 2.0
"""Where any layouts will do."""


def graph_of(samples):
    return forked(samples, True)


def rehearsed(peak):
    """Returns a rehearsal in which every rank needs what ``peak`` says of a config, in MiB."""

    def rehearse(config, plan):
        need = RankMemory(0, 0, 0, int(peak(config) * MIB), 0)
        return [need.to_dict()] * plan.ranks_per_replica

    return rehearse


def chooser(config, peak=lambda config: 1, machine=MACHINE, **options):
    options.setdefault("budget_s", LONG_S)
    return Chooser(config, graph_of, machine, rehearsed(peak), **options)


def limited(limit, **parallel):
    config = config_of(**parallel)
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, limit=limit))
