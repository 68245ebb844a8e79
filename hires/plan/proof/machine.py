"""Runs programs of messages on an abstract machine, which decides whether they end.

No receive is a wildcard and no rank looks at a clock, so the machine has one outcome, and one pass
over the programs decides. The semantics say what begins when:

* ``rendezvous`` (gloo, mpi): the least possible buffering. A send ends when its receive is posted;
  messages with one tag between two ranks keep their order, others pass each other. A posted
  operation holds up nothing but its own wait.
* ``mailboxes`` (gloo on one machine): the same, but halos that are not too large go through memory
  (``Event.mail``). Such a send needs no receive, and holds its rank up while two older ones to the
  same tile lie unread. They are read where they are waited for, in the order of sending, whatever
  their tag: another order ends the run. Which of them go there depends on their size, so the
  machine decides as the transport does: ways that are safe alone could block each other.
* ``pair streams`` (nccl, one communicator for every two ranks): each rank has one stream for each
  peer, and what is posted there runs in the order of posting. A send or receive occupies the stream
  until both sides run it, so what is posted behind it cannot begin. There are no tags: the first
  send that runs meets the first receive that runs. Sends and receives of one group call progress
  together, and the stream is free when all of them are done; a call that concerns several peers is
  one unit on each of their streams. A wait ends when the unit of its operation is done.
* ``separate streams`` (nccl, several communicators for every two ranks): the same, but messages of
  different kinds do not stand in each other's way: halos and what travels between stages, in either
  direction of the pipeline (``Event.lane``), and the two ways between the ranks.

Pair streams need an order of posting on which both sides agree, and a pipeline has none that comes
by itself. A receive posted ahead stands before the send that the other side needs first. Receives
that share a call with the sends before them (``program.JOINED``) block each other where a value
skips a stage under 1f1b. Two directions of tiles send halos and stages' values between the same
ranks, in orders that differ. On separate streams the order of a plan's sends is that of its
receives, so posting ahead is as safe as under ``rendezvous``: that is what a backend of this kind
has to use.

Everywhere, a collective begins when all members have come to it, and a rank does not go on before
it is done: what the engine does next needs its result. That is the worst case for nccl too, where
only the device would wait; more waiting can add deadlocks, never hide one.

What is assumed of nccl: all communicators exist before the first step (making one waits for the
other side); kernels of different communicators run side by side on one device; and nothing is
buffered, although small messages may be, which again is the worst case.

Source:
    NCCL user guide, "Point-to-point communication" (calls within a group progress independently,
    the group blocks until all are complete) and "Group calls".
"""

from __future__ import annotations

from hires.plan.event import Event
from hires.plan.proof.explain import explain
from hires.plan.proof.mailboxes import Mailboxes
from hires.plan.proof.rendezvous import Rendezvous
from hires.plan.proof.streams import SeparateStreams, Streams
from hires.plan.proof.walk import Proof, Walk

RENDEZVOUS, MAILBOXES = "rendezvous", "mailboxes"
STREAMS, SEPARATE = "pair streams", "separate streams"

MACHINES: dict[str, type[Walk]] = {
    RENDEZVOUS: Rendezvous,
    MAILBOXES: Mailboxes,
    STREAMS: Streams,
    SEPARATE: SeparateStreams,
}
"""By the name of the semantics."""


def run_machine(
    programs: list[list[Event]], members: list[list[int]], semantics: str = RENDEZVOUS
) -> Proof:
    """Runs one list of events per rank; takes time in proportion to their number.

    Args:
        programs: what each rank does, in order.
        members: the ranks of each group.
        semantics: ``RENDEZVOUS``, ``MAILBOXES``, ``STREAMS`` or ``SEPARATE``.

    Returns:
        The proof; ``problems`` is empty if every rank reaches its end with every message received,
        else it names the mismatches, or the ranks that wait for each other.
    """
    machine = MACHINES[semantics](programs, members)
    machine.run()
    machine.proof.problems += explain(machine)
    return machine.proof
