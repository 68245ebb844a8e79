"""Does the proof say what really happens? Threads execute valid and damaged plans."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from hires.core.ranks.mailbox_limits import SLOTS
from hires.plan.event import Event
from hires.plan.program import AHEAD, JOINED
from hires.plan.proof import semantics as kinds
from hires.plan.proof.machine import Proof, Rendezvous
from hires.plan.proof.prove import run_machine
from hires.plan.proof.semantics import MAILBOXES, RENDEZVOUS, SEPARATE, STREAMS
from tests.helpers.damage import WAYS, Damage, at_once, damage, valid_programs
from tests.helpers.random_plans import random_plan
from tests.helpers.threaded import Outcome, Programs, execute

ORDERS = {
    RENDEZVOUS: (AHEAD,),
    MAILBOXES: (AHEAD,),
    SEPARATE: (AHEAD,),
    STREAMS: (JOINED, JOINED, AHEAD),
}

SAID = r"rank \d+(?: and \d+)*"
"""How problems name ranks."""


def disagreement(proof: Proof, outcome: Outcome) -> str:
    """How a verdict differs from what happened; nothing if it does not."""
    if proof.stuck != outcome.stuck:
        return f"ranks {proof.stuck} were to hang, {outcome.stuck} did"
    if bool(proof.problems) == outcome.ok:
        return f"the proof says {proof.problems}, but {outcome}"
    return ""


def names(problems: list[str], done: Damage) -> bool:
    """Whether some problem names the damaged rank and one of its peers."""
    for text in problems:
        ranks = {int(number) for number in re.findall(r"\d+", " ".join(re.findall(SAID, text)))}
        if done.rank in ranks and ranks & done.peers:
            return True
    return False


def partly_mailed(rng: random.Random, programs: Programs) -> Programs:
    """Sends some halos, as if they were too large for memory: both sides agree by their tags."""
    tags = sorted({event.tag for program in programs for event in program if event.mail})
    kept = {tag for tag in tags if rng.random() < 0.5}
    return [[e._replace(mail=e.mail and e.tag in kept) for e in program] for program in programs]


def tried(seed: int, semantics: str) -> tuple[str, str]:
    """Plans, damages, proves and executes; returns what was done, and what is wrong with it."""
    rng = random.Random(seed)
    programs, members = valid_programs(random_plan(rng), rng.choice(ORDERS[semantics]))
    if semantics == MAILBOXES and rng.random() < 0.5:
        programs = partly_mailed(rng, programs)
    before = run_machine(programs, members, semantics)
    done = damage(rng, programs, members) if rng.random() < 0.85 else None
    proof = run_machine(programs, members, semantics)
    wrong = disagreement(proof, execute(programs, members, semantics))
    harmed = done and proof.problems and not before.problems
    if not wrong and harmed and not names(proof.problems, done):
        wrong = f"{done} is told as {proof.problems}"
    how = f"{done.kind if done else 'nothing'}: {'harm' if proof.problems else 'fine'}"
    return how, f"seed {seed}, {semantics}: {wrong}" if wrong else ""


def compare(seeds: range, semantics: str) -> tuple[Counter[str], list[str]]:
    """Counts what was done, and lists what was wrong."""
    found = [tried(seed, semantics) for seed in seeds]
    return Counter(how for how, _ in found), [wrong for _, wrong in found if wrong]


@pytest.mark.parametrize("semantics", ORDERS)
def test_verdict_is_what_threads_do(semantics):
    seen, wrong = compare(range(60), semantics)  # the first of the thousand below
    assert not wrong
    assert seen["nothing: fine"] > 2
    assert sum(count for how, count in seen.items() if how.endswith("harm")) > 20


@pytest.mark.slow
@pytest.mark.parametrize("semantics", ORDERS)
def test_verdict_is_what_threads_do_in_a_thousand_plans(semantics):
    seen, wrong = compare(range(1000), semantics)
    assert not wrong
    assert {how.split(":")[0] for how in seen} == {"nothing", *WAYS}


class Buffered(Rendezvous):
    """A machine that is wrong on purpose: a send ends as soon as it is posted."""

    def post(self, rank: int, event: Event) -> int:
        steps = super().post(rank, event)
        if event.kind == "send":
            self.open_sends[rank].pop((rank, event.peer, event.tag), None)
        return steps

    def end_send(self, channel: tuple[int, int, int]) -> None:
        self.open_sends[channel[0]].pop(channel, None)


def blocking_programs(seed: int) -> tuple[Programs, list[list[int]]]:
    """A random plan whose ranks wait for every send at once."""
    programs, members = valid_programs(random_plan(random.Random(seed)), AHEAD)
    return [at_once(program) for program in programs], members


def test_buffered_sends_are_caught_by_the_threads(monkeypatch):
    found = {}
    for name, kind in (("right", Rendezvous), ("wrong", Buffered)):
        monkeypatch.setitem(kinds.MACHINES, RENDEZVOUS, kind)
        found[name] = [
            disagreement(run_machine(*made), execute(*made))
            for made in map(blocking_programs, range(20))
        ]
    assert not any(found["right"])
    assert any("were to hang" in text for text in found["wrong"])


def test_rendezvous_is_caught_where_messages_run_on_streams(monkeypatch):
    monkeypatch.setitem(kinds.MACHINES, STREAMS, Rendezvous)
    assert compare(range(20), STREAMS)[1]


@pytest.mark.parametrize("slots", [1, 3])
def test_wrong_number_of_places_is_caught_by_the_threads(monkeypatch, slots):
    made = [blocking_programs(seed) for seed in range(20)]
    made += [crowded_programs(seed) for seed in range(60)]
    found = {}
    for number in (SLOTS, slots):
        monkeypatch.setattr(kinds, "SLOTS", number)
        found[number] = [
            disagreement(run_machine(*one, MAILBOXES), execute(*one, MAILBOXES)) for one in made
        ]
    assert not any(found[SLOTS])
    assert any("were to hang" in text for text in found[slots])


def crowded_programs(seed: int) -> tuple[Programs, list[list[int]]]:
    """Two tiles that each send several halos, and read the other's halos somewhere among them."""
    rng = random.Random(seed)
    number, programs = rng.randint(1, 5), []
    for peer in (1, 0):
        sends = [Event("send", peer, tag, what=f"{tag}", mail=True) for tag in range(number)]
        waits = [Event("wait_recv", peer, tag, what=f"{tag}", mail=True) for tag in range(number)]
        program = [Event("recv", peer, tag, what=f"{tag}", mail=True) for tag in range(number)]
        while sends or waits:
            program.append((sends if not waits or (sends and rng.random() < 0.5) else waits).pop(0))
        programs.append(program)
    return programs, []


def test_threads_tell_a_deadlock_at_once_and_name_who_hangs():
    ring = [
        [Event("recv", peer, 0), Event("wait_recv", peer, 0), Event("send", peer, 0)]
        for peer in (1, 0)
    ]
    bystander = [Event("collective", 0, 0)]
    outcome = execute([*ring, bystander], [[2]])
    assert outcome.stuck == [0, 1]
