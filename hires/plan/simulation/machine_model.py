"""Returns the speed and the links of the machine that a run is planned for.

this machine              its calibration (``hires doctor --calibrate``), or the stated defaults
cluster=NAME with numbers a roofline from ``cluster.tflop_per_s`` and its bandwidths
cluster=NAME without      an error that names the missing keys: nothing is guessed of a site
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from dataclasses import dataclass
from functools import cached_property

from hires.core.config.launcher_config import HERE, node_starts
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.plan.event import Event
from hires.plan.hardware import CUDA, device_of, gpus_of_node
from hires.plan.plan import Plan
from hires.plan.route_choice import table_of
from hires.plan.routes import dtype_class
from hires.plan.simulation.costs import Device, DeviceSpeed, Roofline
from hires.plan.simulation.machine_calibration import CalibratedDevice, Calibration
from hires.plan.simulation.simulate import Link, Network, PassingTime, PlannedStep, Simulation
from hires.plan.tuning_table import Case, MeasuredSeconds

LAUNCH_S = 10e-6
"""Of one operator of PyTorch in eager mode."""
NODE_LATENCY_S, NEAR_LATENCY_S = 20e-6, 10e-6
"""Of a message between nodes through a host adapter, and within a node."""


@dataclass(frozen=True)
class StepTime:
    """What a step of a plan takes, and where its time goes."""

    step_s: float
    computing: float
    """Share of the step in which a rank computes, in the mean over ranks."""
    messages: float
    """Share by which messages lengthen the step."""
    bubble: float
    """Share in which a rank waits for others although messages took no time."""
    crowding: float
    """Share in which a rank waits for a core that others use."""

    @property
    def limit(self) -> str:
        """What takes most of the step: ``compute``, ``messages``, ``bubble`` or ``cores``."""
        parts = {"compute": self.computing, "messages": self.messages}
        parts |= {"bubble": self.bubble, "cores": self.crowding}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, eq=False)
class MachineModel:
    """A machine on which plans are timed; one model for searches, figures and benchmarks."""

    source: str
    """In words: what the seconds come from."""
    network: Network
    calibration: Calibration | None = None
    """Of this machine; None: a cluster's numbers."""
    device: Device | None = None
    """Of a cluster."""
    cores: float = math.inf
    """Of a node, in units of a rank's threads; its GPUs where ranks compute on them."""

    def speed(self, ranks_of_node: int) -> DeviceSpeed:
        """Returns what a rank computes with while so many of a node do."""
        if self.calibration is None:
            assert self.device is not None
            return self.device
        busy = max(1, min(ranks_of_node, cores_of(self.calibration)))
        if busy not in self._speeds:
            self._speeds[busy] = CalibratedDevice(self.calibration, busy)
        return self._speeds[busy]

    @cached_property
    def _speeds(self) -> dict[int, CalibratedDevice]:
        return {}

    def step_time(self, plan: Plan) -> StepTime:
        """Returns what a step of a plan without errors takes."""
        simulation, share = self._simulated(plan)
        step_s = crowded_step_s(simulation, self.cores, share)
        crowding = 1 - simulation.step_s / step_s if step_s else 0.0
        busy_s = simulation.busy_s / len(simulation.ranks)
        messages_s = simulation.step_s - simulation.unlinked_s
        bubble_s = simulation.unlinked_s - busy_s
        return StepTime(
            step_s, busy_s / step_s, messages_s / step_s, max(0.0, bubble_s) / step_s, crowding
        )

    def _simulated(self, plan: Plan) -> tuple[Simulation, float]:
        """Returns a step, and how many replicas share a node."""
        of_node = -(-plan.world // plan.num_nodes)
        starts = node_starts(plan.world, plan.num_nodes)
        network = dataclasses.replace(self.network, node_starts=starts)
        # Ranks that wait for each other leave cores and memory to those that compute.
        copies = min(plan.num_replicas, max(1, of_node // plan.ranks_per_replica))
        nodes = -(-plan.ranks_per_replica // of_node)  # of a replica, whose cores it has
        share, speed = copies / nodes, self.speed(of_node)
        step = PlannedStep(plan)
        simulation = step.simulated(Roofline(plan, speed), network)
        busy_s = simulation.busy_s
        at_once = round(busy_s / (simulation.step_s or math.inf) * share)
        # A rank that waits for a message on its way copies it, so it uses a core, too.
        crowd = max(1.0, busy_s / (simulation.unlinked_s or math.inf) * share / self.cores)
        fewer = self.calibration is not None and at_once < min(of_node, self.cores)
        if fewer or crowd > 1:
            network = dataclasses.replace(network, crowd=crowd)
            speed = self.speed(at_once) if fewer else speed
            simulation = step.simulated(Roofline(plan, speed), network)
        return simulation, share


def machine_of(config: RunConfig, calibration: Calibration) -> MachineModel:
    """Returns the machine of a run: this one, or its cluster; ConfigError: that has no numbers."""
    cluster, device = config.cluster, device_of(config)
    if cluster.tflop_per_s or cluster.name != HERE or device == CUDA:
        return _of_cluster(config, device)
    network, table = calibration.links.network(), table_of(config)
    if table.points:
        network = MeasuredNetwork(**vars(network), measured=MeasuredSeconds(table), device=device)
    source = calibration.source
    if not config.is_here:
        source += "; nodes are taken to be like this machine"
    source += _one_thread(config)
    cores = cores_of(calibration) / config.launcher.threads
    return MachineModel(source, network, calibration, cores=cores)


def cores_of(calibration: Calibration) -> int:
    """Returns the cores of the machine of a calibration; defaults are taken for this one."""
    return calibration.machine.cores if calibration.is_measured else os.cpu_count() or 1


def _one_thread(config: RunConfig) -> str:
    threads = config.launcher.threads
    return f"; of one thread, though ranks have {threads}" if threads > 1 else ""


def _of_cluster(config: RunConfig, device: str) -> MachineModel:
    cluster, several = config.cluster, config.num_nodes > 1
    network_gb = cluster.network_gb_per_s if several else cluster.link_gb_per_s
    needed = {
        "tflop_per_s": bool(cluster.tflop_per_s),
        "memory_gb_per_s": cluster.memory_gb_per_s,
        "link_gb_per_s": cluster.link_gb_per_s,
        "network_gb_per_s": network_gb or not several,
    }
    missing = [f"cluster.{name}" for name, value in needed.items() if not value]
    if missing:
        what = f"cluster={cluster.name}" if cluster.name != HERE else f"device={device}"
        raise ConfigError(
            f"{what} has no numbers to predict step times with; set {', '.join(missing)} (of one "
            f"{'GPU' if device == CUDA else 'core'}), or copy conf/cluster/a100x4.yaml; "
            f"`hires list keys cluster` explains them"
        )
    assert cluster.memory_gb_per_s is not None
    assert cluster.link_gb_per_s is not None
    assert network_gb is not None
    precision = config.precision.name
    rates = {str(name): float(rate) for name, rate in cluster.tflop_per_s.items()}
    like = precision if precision in rates else "fp32"
    like = like if like in rates else max(rates, key=rates.__getitem__)
    rate = rates[like]
    near = Link(NEAR_LATENCY_S, cluster.link_gb_per_s * 1e9)
    far = Link((cluster.latency_us or NODE_LATENCY_S * 1e6) * 1e-6, network_gb * 1e9)
    own = "" if precision in rates else f", with its speed of {like} for {precision}"
    own += _one_thread(config) if device != CUDA else ""
    # Ranks that share a GPU compute in turn, as those that share a core do.
    gpus, threads = gpus_of_node(config), config.launcher.threads
    cores = (gpus if device == CUDA else cluster.cores) or math.inf
    cores /= 1 if device == CUDA else threads
    return MachineModel(
        f"the numbers of cluster={cluster.name}{own}",
        Network(near, far),
        device=Device(rate * 1e12, cluster.memory_gb_per_s * 1e9, LAUNCH_S),
        cores=cores,
    )


def crowded_step_s(simulation: Simulation, cores: float, copies: float = 1.0) -> float:
    """Returns what the step takes on a machine with so many cores.

    cores 2     rank 0  ####....####          at any moment k ranks compute; where k > 2 each of
                rank 1  ########....          them gets 2/k of its time, so that moment takes k/2
                rank 2  ....########          as long, for those that wait, too
                k       222233332222

    Args:
        simulation: of one replica, each of its ranks on a core of its own.
        cores: that its ranks have together, in units of a rank's threads.
        copies: replicas that share them, all alike; below 1: a replica has those of several nodes.
    """
    changes: list[tuple[float, int]] = []
    for item, end_s in itertools.chain(*simulation.ranks):
        changes += [(end_s - item.seconds, 1), (end_s, -1)] if item.seconds else []
    changes.sort()
    more_s, running, last_s = 0.0, 0, 0.0
    for now_s, change in changes:
        crowd = running * copies / cores
        if crowd > 1:
            more_s += (now_s - last_s) * (crowd - 1)
        running, last_s = running + change, now_s
    return simulation.step_s + more_s


@dataclass(frozen=True)
class MeasuredNetwork(Network):
    """A network whose messages take what was measured; the links serve for all others."""

    measured: MeasuredSeconds | None = None
    device: str = "cpu"

    def message_s(self, source: int, target: int, num_bytes: int, event: Event) -> PassingTime:
        """Returns how long a message keeps its lanes busy: what it takes beyond one of a byte."""
        ranks = [source, target]
        latency_s = self._seconds("send", ranks, 1, event)
        whole_s = self._seconds("send", ranks, num_bytes, event)
        if whole_s is None or latency_s is None:
            return super().message_s(source, target, num_bytes, event)
        latency_s = min(latency_s, whole_s)
        return PassingTime(self.crowd * (whole_s - latency_s), self.crowd * latency_s)

    def meeting_s(self, ranks: list[int], event: Event) -> float:
        """Returns how long a collective takes from its last member's arrival."""
        seconds = self._seconds(event.operation, ranks, event.num_bytes, event)
        return super().meeting_s(ranks, event) if seconds is None else self.crowd * seconds

    def _seconds(
        self, operation: str, ranks: list[int], num_bytes: int, event: Event
    ) -> float | None:
        if self.measured is None or event.route is None:
            return None
        same_node = self.node_of(min(ranks)) == self.node_of(max(ranks))
        kind = dtype_class(operation, event.dtype)
        case = Case(operation, len(ranks), same_node, self.device, kind, num_bytes)
        return self.measured.seconds(case, event.route)
