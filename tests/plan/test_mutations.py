"""Does the proof say what really happens? Threads execute valid and damaged plans."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from hires.plan import step_order
from hires.plan.prove import Steps, prove_each
from hires.plan.routes import parse_route
from tests.helpers.damage import WAYS, Damage, at_once, damage, valid_programs
from tests.helpers.random_plans import random_plan
from tests.helpers.threaded import Programs, execute

BACKENDS = ("", "gloo", "nccl")
"""What carries all messages; nothing: each takes its own route."""
GLOO, SHM = map(parse_route, ("gloo:message", "shm:message"))
SAID = r"rank \d+(?: and \d+)*"
"""How problems name ranks."""


def disagreement(programs: Programs, members: list[list[int]]) -> str:
    """How the verdict differs from what happens; nothing if it does not."""
    steps, outcome = Steps(dict(enumerate(programs)), members), execute(programs, members)
    if [*steps.standing] != outcome.stuck:
        return f"ranks {[*steps.standing]} were to hang, {outcome.stuck} did"
    if bool(steps.problems) == outcome.ok:
        return f"the proof says {steps.problems}, but {outcome}"
    return ""


def names(problems: list[str], done: Damage) -> bool:
    """Whether some problem names the damaged rank and one of its peers."""
    for text in problems:
        ranks = {int(number) for number in re.findall(r"\d+", " ".join(re.findall(SAID, text)))}
        if done.rank in ranks and ranks & done.peers:
            return True
    return False


def mixed(rng: random.Random, programs: Programs) -> Programs:
    """Sends some messages over another backend: both sides agree by their tags."""
    tags = sorted({event.tag for program in programs for event in program if event.route == SHM})
    sent = {tag for tag in tags if rng.random() < 0.5}
    return [
        [e._replace(route=GLOO) if e.route == SHM and e.tag in sent else e for e in program]
        for program in programs
    ]


def tried(seed: int, backend: str) -> tuple[str, str]:
    """Plans, damages, proves and executes; returns what was done, and what is wrong with it."""
    rng = random.Random(seed)
    programs, members = valid_programs(random_plan(rng), backend)
    if not backend and rng.random() < 0.5:
        programs = mixed(rng, programs)
    before = prove_each(programs, members)
    done = damage(rng, programs, members) if rng.random() < 0.85 else None
    problems = prove_each(programs, members)
    wrong = disagreement(programs, members)
    harmed = done and problems and not before
    if not wrong and harmed and not names(problems, done):
        wrong = f"{done} is reported as {problems}"
    how = f"{done.kind if done else 'nothing'}: {'harm' if problems else 'fine'}"
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
    assert not any(disagreement(*one) for one in programs)
    with monkeypatch.context() as patch:  # a send ends as soon as it is posted
        patch.setattr(step_order._Reader, "_wait_sends", lambda self, event, wait: [])
        wrong = [disagreement(*one) for one in programs]
    assert any("were to hang" in text for text in wrong)
    monkeypatch.setattr(step_order, "STREAMED", ())  # streams that hold nothing up
    assert any(wrong for _, wrong in (tried(seed, "nccl") for seed in range(40)))
