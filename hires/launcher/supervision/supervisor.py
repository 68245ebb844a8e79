"""What does the launcher do between the first rank's start and the last rank's end?

It starts the ranks, passes on what they record, and stops all of them as soon as one fails or
somebody interrupts: a rank that is left alone waits for its dead neighbour for minutes. A request
to make way goes on to the ranks, which save their state and end by themselves.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import PREEMPTED, RunError
from hires.core.store import file_names, records
from hires.core.store.attempts import Attempt
from hires.launcher.interface import OnLine
from hires.launcher.ranks import ports, rank_group, spawn
from hires.launcher.ranks.agent_ranks import Together
from hires.launcher.ranks.places import Making, Places
from hires.launcher.ranks.processes import RankProcess
from hires.launcher.status import process_id
from hires.launcher.status.run_progress import MetricsTail
from hires.launcher.supervision import blame, watchdog
from hires.launcher.supervision.interrupts import Interrupts
from hires.launcher.supervision.out_of_memory import OomCount

POLL_S = 0.05
"""How often the ranks are looked at; it costs nothing that a measurement would see."""
SETTLE_S = 0.3
"""How long the other ranks may still report after one failed, so that the cause is among them."""
GRACE_S = 2.0
"""How long ranks may take to end after SIGTERM."""
TOLD_S = 5.0
"""How long after ranks elsewhere were ended by SIGTERM the same may reach the supervisor."""
STOPPED = (None, 0, -signal.SIGTERM, -signal.SIGKILL)
"""How ranks end, if they do, whose job was stopped from outside."""
MADE_WAY = (None, 0, PREEMPTED, -signal.SIGUSR2)
"""How ranks end, if they do, that were asked to make way; some die of it while they start."""


@dataclass(frozen=True)
class Job:
    """What is to be run."""

    run_dir: Path
    attempt: int
    config: RunConfig
    world: int
    module: str
    """Python module that every rank runs."""
    args: Sequence[str]
    """What follows the run folder on its command line."""
    on_line: OnLine | None
    """Called with every new line of ``metrics.jsonl``."""
    places: Places
    """Where the ranks run."""

    @property
    def folder(self) -> Path:
        """Folder of the attempt."""
        return records.attempt_dir(self.run_dir, self.attempt)


@dataclass
class End:
    """How a world of ranks ended."""

    state: str
    cause: str | None = None
    reason: str | None = None
    """The cause in one word for programs, as ``preempted``; None where there is none."""
    failed_rank: int | None = None
    tail: list[str] = field(default_factory=list)
    exit_codes: dict[int, int] = field(default_factory=dict)
    port_taken: bool = False
    """Whether it failed because somebody else listens at the port."""


class Supervisor:
    """Runs one world of ranks to its end."""

    def __init__(self, job: Job, port: int, interrupts: Interrupts) -> None:
        """Takes the job, the port to meet at, and where interrupts are counted."""
        self.job = job
        self.port = port
        self.interrupts = interrupts
        self._crew = self._crew_of_job()
        self._tail = MetricsTail(job.folder / file_names.METRICS)
        self._watchdog = watchdog.Watchdog(job.folder, job.config.comm.timeout_s)
        self._oom = OomCount()
        self._events_before = len(records.read_lines(job.folder / file_names.EVENTS))
        self._end = job.folder / file_names.EXIT
        self._looks_for_end = not self._end.exists()
        self._looked_s = 0.0
        self._complete = False

    @property
    def ranks(self) -> Sequence[rank_group.Member | RankProcess]:
        """What is known of each rank."""
        return self._crew.ranks

    def run(self) -> End:
        """Returns how it ended, when no process of it is left.

        Raises:
            RunError: the ranks cannot be started.
        """
        self._note("launch_started", port=self.port, **process_id.myself())
        try:
            self._crew.begin(lambda: self.interrupts.count > 0)
            spawn.release()
            end = self._watch()
            self._feed()
        finally:
            self._crew.kill()
        end.exit_codes = {r.rank: r.code for r in self.ranks if r.code is not None}
        return end

    def _crew_of_job(self) -> rank_group.Crew:
        """Returns the ranks, which are not started yet."""
        job = self.job
        where = (job.run_dir, job.attempt, job.folder, job.config)
        start = rank_group.Start(*where, job.module, job.args, job.places, self.port, self._note)
        starter = job.places.starter
        return rank_group.Apart(start) if starter is None else Together(start, starter)

    def _watch(self) -> End:
        """Waits until all ranks are done, one fails or somebody interrupts."""
        while True:
            self._poll()
            self._feed()
            if self.interrupts.count:
                return self._cancel()
            codes = {rank.code for rank in self.ranks}
            if codes - {None, 0, PREEMPTED} or codes == {0, PREEMPTED}:
                return self._fail()
            if codes == {0}:
                return self._all_ended()
            if codes == {PREEMPTED}:
                return self._made_way(self.job.places.making_way())
            if self.interrupts.requests:
                return self._make_way()
            closed = self._closed()
            if closed is not None:
                return closed
            if self._watchdog.look({rank.rank for rank in self.ranks if rank.code is not None}):
                return self._hang()
            time.sleep(POLL_S)

    def _all_ended(self) -> End:
        """Returns the end of a world whose ranks, or what stands for them, all ended well.

        srun does so, too, when Slurm has given its node up.
        """
        self._feed()
        if self.job.places.relayed and not self._complete:
            taken = self.job.places.stopped()
            if taken is not None:
                return self._made_way(taken)
        return End("done")

    def _cancel(self) -> End:
        """Stops all ranks because somebody interrupted; a second interrupt does not wait."""
        self._note("stopping", why=self.interrupts.name)
        self._crew.stop(GRACE_S, lambda: self.interrupts.count > 1)
        taken = self.job.places.stopped() if self.interrupts.number == signal.SIGTERM else None
        if taken is not None:
            return self._made_way(taken)
        return End("cancelled", f"stopped by {self.interrupts.name}")

    def _make_way(self) -> End:
        """Passes a request to make way on to the ranks, and waits until they have."""
        self._note("asked_to_make_way")
        self._crew.ask()
        making = self.job.places.making_way()
        self._wait(making.patience_s, lambda: any(not _makes_way(rank) for rank in self.ranks))
        if self.interrupts.count:
            return self._cancel()
        if not all(_makes_way(rank) for rank in self.ranks):
            self._wait(SETTLE_S)  # a neighbour of one that died of the signal has failed, too
            if not any(rank.code == -signal.SIGUSR2 for rank in self.ranks):
                return self._fail()
        self._crew.stop(GRACE_S, lambda: self.interrupts.count > 0)
        return End("done") if all(rank.code == 0 for rank in self.ranks) else self._made_way(making)

    def _made_way(self, making: Making) -> End:
        """Returns the end of a world that was asked to make way."""
        told = [line for line in self._events() if line.get("event") == "made_way"]
        done = f" after {told[-1]['step']} of {self.job.config.steps} steps" if told else ""
        return End("failed", f"{making.cause}{done}; {making.then}", making.reason)

    def _closed(self) -> End | None:
        """Stops all ranks if somebody else has written the end of this attempt.

        Slurm gives up a node that does not answer, and starts its job again elsewhere, though
        everything on the node may still run: two attempts at once would be in each other's way.
        """
        now_s = time.monotonic()
        if not self._looks_for_end or now_s - self._looked_s < watchdog.LOOK_S:
            return None
        self._looked_s = now_s
        said = Attempt(self.job.run_dir, self.job.attempt).exit
        if not said:
            return None
        self._note("stopping", why="somebody else has ended this attempt")
        self._crew.stop(GRACE_S, lambda: self.interrupts.count > 0)
        return End(str(said.get("state")), said.get("cause"), said.get("reason"))

    def _hang(self) -> End:
        """Finds out what the ranks are at, then stops them, because nothing moves any more."""
        job = self.job
        found = watchdog.investigate(
            job.run_dir, job.attempt, self._crew.pids(), lambda: self.interrupts.count > 0
        )
        self._note("stopping", why="hang", cause=found.cause)
        self._crew.stop(GRACE_S, lambda: self.interrupts.count > 0)
        cause = f"{found.cause}; stopped after comm.timeout_s={job.config.comm.timeout_s:g} s"
        return End("failed", cause, "hang", found.rank)

    def _fail(self) -> End:
        """Stops all ranks because one failed, and finds the one that began it."""
        self._wait(SETTLE_S)
        taken = self.job.places.stopped() if self.job.places.relayed else None
        if taken is not None:  # the scheduler has ended the ranks, and has not told this process
            self._note("stopping", why=taken.cause)
            self._crew.stop(GRACE_S, lambda: self.interrupts.count > 0)
            return self._made_way(taken)
        told = self._crew.broken or any(rank.code == -signal.SIGTERM for rank in self.ranks)
        if told and self.job.places.relayed:
            # Who ends a whole job tells the ranks and this process, in any order.
            self._wait(TOLD_S, ended=False)
        if self.interrupts.count and all(rank.code in STOPPED for rank in self.ranks):
            return self._cancel()
        if self._crew.broken and all(rank.code in STOPPED for rank in self.ranks):
            return self._break(self._crew.broken)
        # Who made way is to blame only if nobody else is.
        failed = [rank.rank for rank in self.ranks if rank.code not in (None, 0, PREEMPTED)]
        failed = failed or [rank.rank for rank in self.ranks if rank.code]
        self._note("stopping", why="a rank failed", failed=failed)
        self._crew.stop(GRACE_S, lambda: self.interrupts.count > 0)
        failure = blame.first_failure(self.ranks, failed, self._events(), self._oom.rose())
        self._feed()
        reason = failure.reason or (None if self._tail.seen else "launch")
        port_taken = ports.was_taken(self.ranks[0].log) and not self._tail.seen
        return End(
            "failed", failure.cause, reason, failure.rank, failure.tail, port_taken=port_taken
        )

    def _break(self, why: str) -> End:
        """Returns the end of a world whose ranks did nothing wrong: what started them did."""
        self._note("stopping", why=why)
        self._feed()
        return End("failed", why, None if self._tail.seen else "launch")

    def _events(self) -> list[dict[str, Any]]:
        """Returns what was noted since this start."""
        return records.read_lines(self.job.folder / file_names.EVENTS)[self._events_before :]

    def _wait(
        self, most_s: float, enough: Callable[[], bool] = lambda: False, ended: bool = True
    ) -> None:
        """Waits until somebody interrupts, at most so long.

        Args:
            most_s: the longest wait.
            enough: asked again and again; ends it, too.
            ended: whether the wait also ends with the last rank.
        """
        until = time.monotonic() + most_s
        while time.monotonic() < until and not self.interrupts.count and not enough():
            if ended and all(rank.code is not None for rank in self.ranks):
                return
            time.sleep(POLL_S / 2)
            self._poll()
            self._feed()

    def _poll(self) -> None:
        """Notes which ranks have ended."""
        for rank in self._crew.poll():
            self._note("rank_exited", rank=rank.rank, code=rank.code)

    def _feed(self) -> None:
        """Passes on what the ranks have recorded meanwhile."""
        for line in self._tail.read():
            self._complete = self._complete or line.get("kind") == "done"
            if self.job.on_line is not None:
                self.job.on_line(line)

    def _note(self, event: str, **fields: Any) -> None:
        """Writes an event down; on a full disk it matters more that the ranks are stopped."""
        with contextlib.suppress(RunError):
            records.event(self.job.run_dir, self.job.attempt, event, **fields)


def _makes_way(rank: rank_group.Member | RankProcess) -> bool:
    """Whether a rank still runs, or ended as one does that was asked to make way."""
    return rank.code in MADE_WAY
