"""Names how a message travels: the backend, the algorithm, and the size of its segments.

The planner chooses the route of every message, the proof takes its semantics, and ``hires.comm``
follows it. As text: ``gloo``, ``gloo:direct``, ``mpi:segmented:4MiB``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hires.core.errors import ConfigError
from hires.core.message_backends import BACKEND_FACTS
from hires.core.registry import offer
from hires.core.units import parse_size

BACKENDS = (*BACKEND_FACTS,)
STREAMED = tuple(name for name in BACKENDS if BACKEND_FACTS[name].has_streams)
"""Backends whose messages pass streams of a GPU."""
ONE_MACHINE = tuple(name for name in BACKENDS if BACKEND_FACTS[name].one_machine)
"""Backends that need all ranks on one machine."""
MEMORY = tuple(name for name in BACKENDS if BACKEND_FACTS[name].shares_memory)
"""Backends whose messages are in memory that ranks share."""
OWN, MESSAGE, SEGMENTED, DIRECT = "collective", "message", "segmented", "direct"
CHANNEL, FLAT = "channel", "flat"
ALGORITHMS = {
    OWN: "the operation of the backend itself",
    MESSAGE: "a send or receive of the backend itself",
    DIRECT: "every rank sends to every other one",
    SEGMENTED: "one operation for each segment, several at once; broadcasts along a chain of ranks",
    CHANNEL: "a message on the stream of its communicator",
    FLAT: "several tensors as one",
}
"""Algorithm -> what it does."""
PLAN_ONLY = (CHANNEL, FLAT)
"""Algorithms of plans; elsewhere the operation of the backend itself takes their place."""
OPERATIONS = (
    "send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce",
    "gather", "scatter", "barrier",
)  # fmt: skip
"""What a route carries out; ``send`` stands for both sides of a message."""
CARRIES = {
    SEGMENTED: ("all_reduce", "reduce", "broadcast", "all_gather"),
    DIRECT: OPERATIONS[1:-1],  # all but messages and barriers
    **dict.fromkeys((MESSAGE, CHANNEL), ("send",)),
    FLAT: ("all_reduce",),
}
"""Algorithm -> operations; one that is not listed has all of them."""
DTYPES = {
    "float": ("float32", "float64", "complex64", "complex128"),
    "half": ("float16", "bfloat16"),
    "integer": ("int64", "int32", "int16", "int8", "uint8", "bool"),
    "bytes": (),
}
"""Class -> types; operations that do not reduce move ``bytes``."""

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


class Route(NamedTuple):
    """How a message travels."""

    backend: str
    algorithm: str = OWN
    segment_bytes: int = 0
    """0: the tensor is not divided."""

    @property
    def names(self) -> tuple[str, str]:
        """Names of its backend and algorithm, with the segment, as logs have them."""
        size = f" {exact_size(self.segment_bytes)}" if self.segment_bytes else ""
        return self.backend, f"{self.algorithm}{size}"

    def __str__(self) -> str:
        """Returns the text that :func:`parse_route` reads."""
        if self.segment_bytes:
            return f"{self.backend}:{self.algorithm}:{exact_size(self.segment_bytes)}"
        return self.backend if self.algorithm == OWN else f"{self.backend}:{self.algorithm}"


def is_possible(route: Route) -> bool:
    """Whether a backend can have the algorithm: streams cannot post messages one by one."""
    return route.algorithm != DIRECT or route.backend not in STREAMED


def dtype_class(operation: str, dtype: str) -> str:
    """Returns the class of a type in an operation, as ``float32`` or ``torch.float32``."""
    if operation not in ("all_reduce", "reduce_scatter", "reduce"):
        return "bytes"
    name = dtype.removeprefix("torch.")
    return next((kind for kind, names in DTYPES.items() if name in names), "bytes")


def parse_route(text: str, backends: Sequence[str] = BACKENDS) -> Route:
    """Returns the route of a text ``backend[:algorithm[:segment]]``, as ``mpi:segmented:4MiB``.

    Raises:
        ConfigError: an unknown name, a segment that is no size, or one that the algorithm lacks.
    """
    backend, *rest = text.strip().split(":")
    if len(rest) > 2:
        raise ConfigError(f"route {text!r} has {len(rest) + 1} parts; write backend:algorithm:size")
    algorithm = rest[0] if rest else OWN
    for kind, name, names in (
        ("backend", backend, backends),
        ("algorithm", algorithm, ALGORITHMS),
    ):
        if name not in names:
            raise ConfigError(f"route {text!r}: unknown {kind} {name!r}; {offer(name, names)}")
    if len(rest) < 2:
        if algorithm == SEGMENTED:
            raise ConfigError(f"route {text!r} has no segment size; write {text.strip()}:4MiB")
        return Route(backend, algorithm)
    segment = parse_size(rest[1])
    if segment is None:
        raise ConfigError(f"route {text!r}: segment {rest[1]!r} is no size; write 4MiB or 65536")
    if algorithm != SEGMENTED:
        raise ConfigError(f"route {text!r}: {algorithm} has no segments; {SEGMENTED} has")
    return Route(backend, algorithm, segment)


def exact_size(num_bytes: int) -> str:
    """Returns bytes as a text that is read back exactly, as ``4MiB`` or ``1000``."""
    for unit, factor in _UNITS.items():
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)
