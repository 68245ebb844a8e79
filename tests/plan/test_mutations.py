"""Does the proof say what really happens? Threads execute valid and damaged plans."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from hires.core.ranks.mailbox_limits import SLOTS
from hires.plan.event import Event
from hires.plan.proof import explain, step_order
from hires.plan.proof.explain import prove_each
from hires.plan.proof.prove import verify
from hires.plan.proof.step_order import Proof
from hires.plan.routes import parse_route
from tests.helpers.damage import WAYS, Damage, at_once, damage, valid_programs
from tests.helpers.random_plans import random_plan
from tests.helpers.small_plans import LAYOUTS, plan_of
from tests.helpers.threaded import Outcome, Programs, execute

BACKENDS = ("", "gloo", "nccl")
"""What carries all messages; nothing: each takes its own route."""
GLOO, MAIL = map(parse_route, ("gloo:message", "shm:mailbox"))
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
    tags = sorted({event.tag for program in programs for event in program if event.route == MAIL})
    sent = {tag for tag in tags if rng.random() < 0.5}
    return [
        [e._replace(route=GLOO) if e.route == MAIL and e.tag in sent else e for e in program]
        for program in programs
    ]


def tried(seed: int, backend: str) -> tuple[str, str]:
    """Plans, damages, proves and executes; returns what was done, and what is wrong with it."""
    rng = random.Random(seed)
    programs, members = valid_programs(random_plan(rng), backend)
    if not backend and rng.random() < 0.5:
        programs = partly_mailed(rng, programs)
    before = prove_each(programs, members)
    done = damage(rng, programs, members) if rng.random() < 0.85 else None
    proof = prove_each(programs, members)
    wrong = disagreement(proof, execute(programs, members))
    harmed = done and proof.problems and not before.problems
    if not wrong and harmed and not names(proof.problems, done):
        wrong = f"{done} is told as {proof.problems}"
    how = f"{done.kind if done else 'nothing'}: {'harm' if proof.problems else 'fine'}"
    return how, f"seed {seed}, {backend}: {wrong}" if wrong else ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_verdict_is_what_threads_do(backend):
    found = [tried(seed, backend) for seed in range(40)]
    seen = Counter(how for how, _ in found)
    assert not [wrong for _, wrong in found if wrong]
    assert seen["nothing: fine"] > 1
    assert sum(count for how, count in seen.items() if how.endswith("harm")) > 12
    assert len({how.split(":")[0] for how in seen} & {*WAYS}) > 6


def blocking_programs(seed: int) -> tuple[Programs, list[list[int]]]:
    """A random plan whose ranks wait for every send at once."""
    programs, members = valid_programs(random_plan(random.Random(seed)), "gloo")
    return [at_once(program) for program in programs], members


def test_wrong_orders_are_caught_by_the_threads(monkeypatch):
    programs = [*map(blocking_programs, range(8))]
    assert not any(disagreement(prove_each(*one), execute(*one)) for one in programs)
    with monkeypatch.context() as patch:  # a send ends as soon as it is posted
        patch.setattr(step_order._Reader, "_wait_sends", lambda self, event, wait: [])
        wrong = [disagreement(prove_each(*one), execute(*one)) for one in programs]
    assert any("were to hang" in text for text in wrong)
    for module in (step_order, explain):  # streams that hold nothing up
        monkeypatch.setattr(module, "STREAMED", ())
    assert any(wrong for _, wrong in (tried(seed, "nccl") for seed in range(40)))


@pytest.mark.parametrize("slots", [1, 3])
def test_wrong_number_of_places_is_caught_by_the_threads(monkeypatch, slots):
    made = [crowded_programs(seed) for seed in range(60)]
    found = {}
    for number in (SLOTS, slots):
        monkeypatch.setattr(step_order, "SLOTS", number)
        found[number] = [disagreement(prove_each(*one), execute(*one)) for one in made]
    assert not any(found[SLOTS])
    assert any("were to hang" in text for text in found[slots])


def crowded_programs(seed: int) -> tuple[Programs, list[list[int]]]:
    """Two tiles that each send several halos, and read the other's halos somewhere among them."""
    rng = random.Random(seed)
    number, programs = rng.randint(1, 5), []
    for peer in (1, 0):
        sends = [Event("send", peer, tag, what=f"{tag}", route=MAIL) for tag in range(number)]
        waits = [Event("wait_recv", peer, tag, what=f"{tag}", route=MAIL) for tag in range(number)]
        program = [Event("recv", peer, tag, what=f"{tag}", route=MAIL) for tag in range(number)]
        while sends or waits:
            program.append((sends if not waits or (sends and rng.random() < 0.5) else waits).pop(0))
        programs.append(program)
    return programs, []


def test_schedules_and_sends_that_wait_for_each_other_are_errors_with_the_cycle():
    plan = plan_of(**LAYOUTS["pp 1f1b"])
    # What the receives posted one action ahead are for: each side sends first, and waits.
    programs, members = valid_programs(plan)
    assert not prove_each(programs, members).problems
    blocking = [at_once(program) for program in programs]
    assert prove_each(blocking, members).problems[0].startswith("deadlock: rank ")
    plan.schedule[1] = ["B0", *[action for action in plan.schedule[1] if action != "B0"]]
    [*findings] = verify(plan)
    assert findings[0].severity == "error"
    assert findings[0].text.startswith("deadlock: rank ")
    assert "in B0 from rank 2; rank 2 waits for " in findings[0].text
    assert plan.verdict == f"{len(findings)} problem{'s' if len(findings) > 1 else ''}"
