"""Simulates messages with the seconds that a tuning table has measured for their routes."""

from __future__ import annotations

from dataclasses import dataclass

from hires.plan.event import Event
from hires.plan.message_routes import RouteCase
from hires.plan.point_times import MeasuredSeconds
from hires.plan.routes import Route
from hires.plan.simulation.simulate import Network, PassingTime
from hires.plan.table_rules import Case, dtype_class
from hires.plan.traffic import Operation


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

    def meeting_s(self, ranks: list[int], call: Operation, event: Event) -> float:
        """Returns how long a collective takes from its last member's arrival."""
        seconds = self._seconds(call.operation, ranks, call.num_bytes, event)
        return super().meeting_s(ranks, call, event) if seconds is None else self.crowd * seconds

    def has_measured(self, case: RouteCase, route: Route) -> bool:
        """Whether the messages of a plan's case take what was measured."""
        operation, _, ranks, near, kind, num_bytes = case
        ranks = 2 if operation == "send" else ranks
        of_table = Case(operation, ranks, near, self.device, kind, num_bytes)
        return self.measured is not None and self.measured.seconds(of_table, route) is not None

    def _seconds(
        self, operation: str, ranks: list[int], num_bytes: int, event: Event
    ) -> float | None:
        if self.measured is None or event.route is None:
            return None
        nodes = [self.node_of(rank) for rank in ranks]
        near = max(map(nodes.count, set(nodes)))
        kind = dtype_class(operation, event.dtype)
        case = Case(operation, len(ranks), near, self.device, kind, num_bytes)
        return self.measured.seconds(case, event.route)
