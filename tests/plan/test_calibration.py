"""Which seconds a machine has: those of its samples or its cluster, and never those of another."""

from __future__ import annotations

import dataclasses
import re

import pytest

from hires.core.errors import ConfigError
from hires.core.store.cache import sealed
from hires.plan.simulation import machine_calibration as kept
from hires.plan.simulation.machine_calibration import (
    CalibratedDevice,
    Sample,
    keep_calibration,
    load_calibration,
)
from hires.plan.simulation.machine_model import (
    LAUNCH_S,
    NEAR_LATENCY_S,
    NODE_LATENCY_S,
    machine_of,
)
from tests.helpers.calibrations import CALIBRATION, conv_work
from tests.helpers.small_plans import config_of


def test_all_cores_busy_have_samples_of_their_own_and_ranks_that_share_a_core_take_turns():
    for work, ranks, seconds in CALIBRATION.samples:
        if ranks == 1:
            assert CalibratedDevice(CALIBRATION).seconds(work) == pytest.approx(seconds)
    work = conv_work(2**12)
    samples = [Sample(work, 1, 2e-3), Sample(work, 2, 8e-3)]
    calibration = dataclasses.replace(CALIBRATION, samples=samples)
    assert calibration.machine.cores == 3
    seconds = [CalibratedDevice(calibration, busy).seconds(work) for busy in (1, 2, 3, 6)]
    assert seconds == pytest.approx([2e-3, 4e-3, 8e-3, 16e-3])  # between them on a logarithm


@pytest.fixture
def here(tmp_path, monkeypatch):
    """This machine, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HIRES_CACHE", raising=False)
    return dataclasses.replace(CALIBRATION, machine=kept.this_machine())


@pytest.mark.parametrize("facts", [{"cpu": "another"}, {"torch": "1.0"}, {"hires": "0"}])
def test_calibration_of_another_machine_or_version_is_left_aside_or_refused(here, facts):
    assert load_calibration() is None
    other = dataclasses.replace(here, machine=here.machine._replace(**facts))
    keep_calibration(other)
    assert kept.calibration_or_defaults().source.startswith("defaults, not measured here")
    file = keep_calibration(here)
    assert load_calibration().to_dict() == here.to_dict()
    file.write_text(sealed(other.to_dict(), file.name))  # as a copied cache would have it
    [(name, value)] = facts.items()
    with pytest.raises(ConfigError, match=rf"{name}='{value}'.*hires doctor --calibrate"):
        load_calibration()


def test_damaged_file_is_refused(here):
    path = keep_calibration(here)
    text = path.read_text()
    changed = re.sub(r'_s": (\d)', r'_s": 1\1', text, count=1)
    for damaged in (text[: len(text) // 2], "[]", changed, "[" * 200_000):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match="hires doctor --calibrate"):
            load_calibration()


def of_cluster(nodes=2, **other):
    config = config_of()
    cluster = {"name": "ours", "gpus": 4, "tflop_per_s": {"fp32": 10.0, "bf16": 40.0}}
    cluster |= {"memory_gb_per_s": 1000.0, "link_gb_per_s": 200.0, "network_gb_per_s": 20.0}
    cluster |= {"latency_us": 5.0, **other}
    return dataclasses.replace(
        config,
        cluster=dataclasses.replace(config.cluster, **cluster),
        launcher=dataclasses.replace(config.launcher, name="slurm", nodes=nodes),
        device="cuda",
    )


def test_numbers_of_a_cluster_are_those_of_its_ranks():
    machine = machine_of(of_cluster(), CALIBRATION)
    device = machine.device
    assert (device.flops_per_s, device.bytes_per_s, device.launch_s) == (10e12, 1e12, LAUNCH_S)
    network = dataclasses.replace(machine.network, node_starts=(4,))
    near, far = (network.link([0, rank]) for rank in (3, 4))
    assert (near.latency_s, near.bytes_per_s) == (NEAR_LATENCY_S, 200e9)
    assert (far.latency_s, far.bytes_per_s) == pytest.approx((5e-6, 20e9))
    assert (machine.calibration, machine.source) == (None, "the numbers of cluster=ours")
    usual = machine_of(of_cluster(latency_us=None), CALIBRATION)
    assert usual.network.far.latency_s == pytest.approx(NODE_LATENCY_S)
    assert machine_of(of_cluster(nodes=1, network_gb_per_s=None), CALIBRATION)
    with pytest.raises(ConfigError, match=r"set cluster\.network_gb_per_s \(of one GPU\)"):
        machine_of(of_cluster(network_gb_per_s=None), CALIBRATION)
