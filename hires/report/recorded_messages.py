"""The messages of a run as its record holds them: by kind, codec and rank."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class MessageRow:
    """The messages of an operation, kind, route and size in some steps."""

    operation: str
    kind: str
    backend: str
    algorithm: str
    size: int
    count: int
    bytes: int
    issue_s: float = 0.0
    wait_s: float = 0.0
    plain_bytes: int = 0
    """Of what is planned: without a codec."""


@dataclass
class CodeRow:
    """What a codec has encoded and decoded in some steps."""

    codec: str
    count: int
    code_s: float
    changed: float
    """Sum of the squares of what it changed in the first message of each rank."""
    numbers: float
    """Sum of the squares of those numbers."""


@dataclass
class RankTraffic:
    """All messages of one rank."""

    rank: int
    step_s: float
    count: int
    bytes: int
    issue_s: float
    wait_s: float


@dataclass
class RecordedMessages:
    """The messages of the steps that count, as ``core.store.message_files`` adds them up."""

    first: int
    steps: int
    step_s: float
    rows: list[MessageRow]
    planned: list[MessageRow]
    ranks: list[RankTraffic]
    codes: list[CodeRow] = field(default_factory=list)
