"""Are seconds those of the samples at their sizes, and between them elsewhere?"""

from __future__ import annotations

import bisect
import dataclasses
import math
import random

import pytest

from hires.plan.operators.operator_families import CONV, POINTWISE
from hires.plan.simulation.calibrated_device import (
    DEFAULT_DEVICE,
    NEIGHBOURS,
    CalibratedDevice,
    Factors,
    _nearest,
)
from hires.plan.simulation.costs import Roofline
from hires.plan.simulation.machine_calibration import Calibration, Sample
from hires.plan.simulation.node_work import node_work
from hires.plan.simulation.simulate import simulate
from tests.helpers.calibrations import CALIBRATION, conv_work
from tests.helpers.small_plans import LAYOUTS, plan_of


def with_samples(*samples: Sample) -> Calibration:
    return dataclasses.replace(CALIBRATION, samples=[*samples])


def test_seconds_at_a_sample_are_those_of_the_sample():
    device = CalibratedDevice(CALIBRATION)
    for work, ranks, seconds in CALIBRATION.samples:
        if ranks == 1:
            assert device.seconds(work) == pytest.approx(seconds)


def test_seconds_between_two_samples_grow_from_one_to_the_other():
    sizes = [2**k for k in range(8, 17)]
    ends = (Sample(conv_work(sizes[0]), 1, 1e-3), Sample(conv_work(sizes[-1]), 1, 60e-3))
    device = CalibratedDevice(with_samples(*ends))
    seconds = [device.seconds(conv_work(size)) for size in sizes]
    assert seconds == sorted(seconds)
    assert (seconds[0], seconds[-1]) == (pytest.approx(1e-3), pytest.approx(60e-3))


def test_nothing_is_faster_than_a_launch():
    fast = Sample(conv_work(2**14), 1, 1e-9)
    device = CalibratedDevice(with_samples(fast))
    assert device.seconds(conv_work(1)) == CALIBRATION.overheads.launch_s


def test_class_without_samples_has_the_memory_of_the_machine():
    work = conv_work(2**16)._replace(kind="relu", family=POINTWISE, num_bytes=1e9, sizes=(2**20, 8))
    seconds = CalibratedDevice(CALIBRATION).seconds(work)
    overhead_s = CALIBRATION.overheads.launch_s
    assert seconds == pytest.approx(1e9 / CALIBRATION.bytes_per_s + overhead_s)


def test_type_that_was_not_measured_has_the_factor_of_float32():
    work = CALIBRATION.samples[0].work
    device = CalibratedDevice(CALIBRATION)
    assert device.seconds(work._replace(dtype="bfloat16")) == device.seconds(work)


def test_all_cores_busy_have_samples_of_their_own_and_ranks_that_share_a_core_take_turns():
    work = conv_work(2**12)
    calibration = with_samples(Sample(work, 1, 2e-3), Sample(work, 2, 8e-3))
    assert calibration.machine.cores == 3
    seconds = [CalibratedDevice(calibration, busy).seconds(work) for busy in (1, 2, 3, 6)]
    assert seconds == pytest.approx([2e-3, 4e-3, 8e-3, 16e-3])  # between them on a logarithm


def test_factors_of_a_network_apply_to_their_passes():
    work = CALIBRATION.samples[0].work
    factors = Factors(forward=2.0, backward=3.0, optimiser=5.0)
    plain, refined = CalibratedDevice(CALIBRATION), CalibratedDevice(CALIBRATION, 1, factors)
    assert refined.seconds(work) == 2 * plain.seconds(work)
    back = work._replace(back=True)
    assert refined.seconds(back) == 3 * plain.seconds(back)
    assert refined.update_s(1e9) == 5 * plain.update_s(1e9)


def test_steps_of_every_layout_have_seconds_without_a_calibration():
    for layout in ("single", "sp+pp", "gems"):
        plan = plan_of(**LAYOUTS[layout])
        assert simulate(plan, Roofline(plan, DEFAULT_DEVICE)).step_s > 0


def test_work_of_a_share_needs_no_plan():
    plan = plan_of(**LAYOUTS["single"])
    node = plan.graph.by_name["conv1"]
    whole, half = (
        node_work(plan.graph, node, share, dtype="float32", training=True) for share in (1.0, 0.5)
    )
    assert whole is not None
    assert half is not None
    assert (whole.family, whole.sizes) == (CONV, (8 * 13 * 10, 3, 4, 9, 1, 1))
    assert (half.flops, half.sizes[0]) == (whole.flops / 2, whole.sizes[0] / 2)
    assert not whole.input_grad  # it reads the images


def test_nearest_samples_are_those_of_a_look_at_all():
    numbers = random.Random(3)
    located = sorted(((numbers.random(), numbers.random()), numbers.random()) for _ in range(200))
    for _ in range(50):
        place = numbers.uniform(-0.2, 1.2), numbers.random()
        every = sorted((math.dist(place, at), value) for at, value in located)
        first = bisect.bisect_left(located, (place, -math.inf))
        assert _nearest(located, place, first) == every[: NEIGHBOURS + 1]
