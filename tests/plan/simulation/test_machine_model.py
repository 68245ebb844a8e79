"""Which seconds does a search take for a machine, and for the machines of a cluster?"""

from __future__ import annotations

import dataclasses
import math

import pytest

from hires.core.errors import ConfigError
from hires.plan.simulation.machine_model import LAUNCH_S, NEAR_LATENCY_S, MachineModel, machine_of
from hires.plan.simulation.measured_network import MeasuredNetwork
from hires.plan.tuning_table import TuningTable
from tests.helpers.calibrations import CALIBRATION
from tests.helpers.small_plans import LAYOUTS, config_of, plan_of


def of_cluster(nodes=2, precision="fp32", **other):
    config = config_of()
    cluster = {"name": "ours", "gpus": 4, "tflop_per_s": {"fp32": 10.0, "bf16": 40.0}}
    cluster |= {"memory_gb_per_s": 1000.0, "link_gb_per_s": 200.0, "network_gb_per_s": 20.0}
    cluster |= {"latency_us": 5.0, **other}
    return dataclasses.replace(
        config,
        cluster=dataclasses.replace(config.cluster, **cluster),
        launcher=dataclasses.replace(config.launcher, name="slurm", nodes=nodes),
        precision=dataclasses.replace(config.precision, name=precision),
        device="cuda",
    )


def test_numbers_of_a_cluster_are_those_of_its_ranks():
    machine = machine_of(of_cluster(), CALIBRATION)
    device = machine.device
    assert (device.flops_per_s, device.bytes_per_s, device.launch_s) == (10e12, 1e12, LAUNCH_S)
    network = dataclasses.replace(machine.network, ranks_per_node=4)
    near, far = (network.link([0, rank]) for rank in (3, 4))
    assert (near.latency_s, near.bytes_per_s) == (NEAR_LATENCY_S, 200e9)
    assert (far.latency_s, far.bytes_per_s) == pytest.approx((5e-6, 20e9))
    assert machine.calibration is None
    assert machine.source == "the numbers of cluster=ours"


def test_precision_of_a_cluster_has_its_own_speed():
    assert machine_of(of_cluster(precision="bf16"), CALIBRATION).device.flops_per_s == 40e12
    half = machine_of(of_cluster(precision="fp16"), CALIBRATION)
    assert half.device.flops_per_s == 10e12
    assert half.source.endswith("with its speed of fp32 for fp16")


def test_ranks_that_share_a_gpu_take_turns():
    assert machine_of(of_cluster(), CALIBRATION).cores == 4
    cpus = dataclasses.replace(of_cluster(cores=48), device="cpu")
    cpus.launcher.threads = 3
    assert machine_of(cpus, CALIBRATION).cores == 16
    cpus.cluster.cores = None
    assert machine_of(cpus, CALIBRATION).cores == math.inf


def test_cluster_needs_the_network_only_between_nodes():
    assert machine_of(of_cluster(nodes=1, network_gb_per_s=None), CALIBRATION)
    with pytest.raises(ConfigError, match=r"set cluster\.network_gb_per_s \(of one GPU\)"):
        machine_of(of_cluster(network_gb_per_s=None), CALIBRATION)


def test_tuning_table_of_this_machine_gives_the_seconds_of_its_messages(monkeypatch):
    config = dataclasses.replace(config_of(), device="cpu")
    assert type(machine_of(config, CALIBRATION).network) is not MeasuredNetwork
    points = ["send 2 2 cpu bytes 1 gloo 0.5"]
    table = TuningTable.from_dict({"format": 1, "rules": [], "default": "gloo", "points": points})
    monkeypatch.setattr("hires.plan.simulation.machine_model.table_of", lambda config: table)
    assert type(machine_of(config, CALIBRATION).network) is MeasuredNetwork


def test_plan_is_timed_with_what_its_ranks_compute_with():
    machine = MachineModel("", CALIBRATION.links.network(), CALIBRATION, cores=3)
    plan = plan_of(**LAYOUTS["lp"])  # one rank after the other
    assert machine.speed_of(plan) is machine.speed(1)
    assert machine.speed_of(plan_of(**LAYOUTS["dp"])) is machine.speed(2)
