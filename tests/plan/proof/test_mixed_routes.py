"""Programs whose messages go through several backends: what may cross, and what may not."""

import json
import random

import pytest

from hires.plan.event import WORLD, Event
from hires.plan.groups import groups
from hires.plan.message_routes import backends_of_plan
from hires.plan.planner import make_plan
from hires.plan.program import events
from hires.plan.proof.common_order import prove_in_order
from hires.plan.proof.prove import creation, judged, run_machine
from hires.plan.proof.semantics import ROUTES
from hires.plan.routes import parse_route
from tests.helpers.random_plans import random_plan
from tests.helpers.small_plans import BATCH, LAYOUTS, config_of, forked

GLOO, MPI, NCCL, SHM = map(parse_route, ("gloo", "mpi", "nccl:channel", "shm:mailbox"))


def joint(kind, what, route, tag=0):
    return Event(kind, WORLD, tag, (4,), "float32", what, route=route)


def message(kind, peer, what, route, tag=0, **more):
    return Event(kind, peer, tag, (4,), "float32", what, route=route, **more)


def problems(*programs):
    members = [list(range(len(programs)))]
    own = run_machine([*map(list, programs)], members, ROUTES).problems
    # Where a common order is a proof, the machine must agree.
    if prove_in_order([*map(iter, programs)], members) is not None:
        assert not own
    return own


def test_collectives_of_two_backends_in_crossed_orders_are_a_deadlock():
    a, b = joint("collective", "sum a", MPI), joint("collective", "sum b", GLOO)
    [text] = problems([a, b], [b, a])
    assert text == (
        "deadlock: rank 0 waits for rank 1 to join sum a through mpi; "
        "rank 1 waits for rank 0 to join sum b through gloo"
    )
    assert not problems([a, b], [a, b])


def test_crossed_waits_of_issued_sums_hold_up_nobody():
    # Both are under way in queues of their own, so each rank may wait in its own order.
    issues = joint("issue", "a", MPI, 1), joint("issue", "b", GLOO, 2)
    waits = [event._replace(kind="wait_issued") for event in issues]
    assert not problems([*issues, *waits], [*issues[::-1], *waits[::-1]])
    # In one backend the same orders are two different sums that meet.
    same = [event._replace(route=GLOO) for event in issues]
    ends = [event._replace(route=GLOO) for event in waits]
    assert "rank 0 calls a" in problems([*same, *ends], [*same[::-1], *ends])[0]


def test_wait_before_the_other_backends_collective_is_a_deadlock():
    # rank 0 waits for the mpi sum first, which rank 1 begins behind its blocking gloo sum.
    a, b = joint("issue", "a", MPI, 1), joint("collective", "b", GLOO)
    wait = a._replace(kind="wait_issued")
    assert not problems([a, b, wait], [b, a, wait])
    [text] = problems([a, wait, b], [b, a, wait])
    assert "rank 0 waits for rank 1 to join a through mpi" in text
    assert "rank 1 waits for rank 0 to join b through gloo" in text


def test_blocking_collective_beside_an_unfinished_message_of_another_backend():
    send, recv = message("send", 1, "x", MPI), message("recv", 0, "x", MPI)
    ends = send._replace(kind="wait_send"), recv._replace(kind="wait_recv")
    both = joint("collective", "sum", GLOO)
    assert not problems([send, both, ends[0]], [both, recv, ends[1]])
    [text] = problems([send, ends[0], both], [both, recv, ends[1]])
    assert "rank 0 waits for rank 1 to receive x" in text


def test_one_tag_means_a_message_within_its_backend():
    sends = message("send", 1, "x", GLOO), message("send", 1, "y", MPI)
    receives = message("recv", 0, "y", MPI), message("recv", 0, "x", GLOO)
    waits = [event._replace(kind="wait_recv") for event in receives]
    ends = [Event("wait_sends", -1, 0)]
    assert not problems([*sends, *ends], [*receives, *waits])


def test_two_sides_on_two_backends_never_meet():
    send, recv = message("send", 1, "x", MPI), message("recv", 0, "x", GLOO)
    found = problems([send], [recv, recv._replace(kind="wait_recv")])
    assert "rank 0 sends x through mpi to rank 1, which never receives it" in found
    assert "rank 1 expects x through gloo from rank 0, which never sends it" in found


def test_two_sides_on_two_algorithms_are_named():
    ways = [parse_route("mpi:segmented:4MiB"), parse_route("mpi:segmented:1MiB")]
    [text] = problems(*([joint("collective", "sum", way)] for way in ways))
    assert "by mpi:segmented:4MiB where rank 1 of the same group" in text


def test_stream_holds_up_its_own_messages_alone():
    def crossed(first, second):
        a, b = message("send", 1, "a", first, 1), message("send", 1, "b", second, 2)
        there = [e._replace(kind="recv", peer=0) for e in (b, a)]
        waits = [e._replace(kind="wait_recv") for e in there]
        return problems([a, b, Event("wait_sends", -1, 0)], [*there, *waits])

    assert not crossed(GLOO, NCCL)
    # A stream has no tags: the first send meets the first receive.
    assert crossed(NCCL, NCCL)[0].startswith("rank 0 sends a as [4] float32 where rank 1 expects b")


def test_full_mailbox_holds_up_a_rank_and_what_another_backend_needs_of_it():
    mails = [message("send", 1, f"mail {n}", SHM, n, mail=True, lane=3) for n in range(3)]
    both = joint("collective", "sum", MPI)
    reads = [e._replace(kind="recv", peer=0) for e in mails]
    waits = [e._replace(kind="wait_recv") for e in reads]
    assert not problems([*mails[:2], both, mails[2]], [both, *reads, *waits])
    [text] = problems([*mails, both], [both, *reads, *waits])
    assert "to make room for mail 2" in text


def mixed(tmp_path, name, hosts=("a", "b")):
    rules = [
        {"operation": "send", "ranks_per_node": "all", "bytes": "..1KiB", "route": "gloo"},
        {"operation": "send", "bytes": "1KiB..", "route": "mpi"},
        {"operation": "all_gather", "route": "mpi"},
        {"operation": "all_reduce", "dtype": "float", "bytes": "512..", "route": "mpi:two_step"},
    ]
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"format": 1, "rules": rules, "default": "gloo"}))
    config = config_of("train", BATCH, **LAYOUTS[name])
    config.comm.table, config.comm.backends = str(path), ["mpi"]
    config.launcher.name, config.launcher.hosts = "mpirun", list(hosts)
    return make_plan(config, forked(BATCH // config.parallel.pieces, True))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "single"])
def test_layouts_are_proved_on_mixed_routes(tmp_path, name):
    plan = mixed(tmp_path, name)
    assert plan.verdict.startswith("deadlock-free"), plan.findings
    assert set(backends_of_plan(plan)) == {"gloo", "mpi"}
    # The machine comes to the same answer as the common order.
    ranks, members = range(plan.ranks_per_replica), groups(plan)
    members = [[rank for rank in group if rank in ranks] for group in members]
    programs = [[*creation(members, rank), *events(plan, rank)] for rank in ranks]
    assert not run_machine(programs, members, ROUTES).problems


def test_mutations_of_mixed_plans_are_found(tmp_path):
    plan = mixed(tmp_path, "sp+gems", hosts=())
    assert set(backends_of_plan(plan)) == {"gloo", "mpi"}
    members = groups(plan)
    programs = [[*events(plan, rank)] for rank in range(plan.world)]
    draw = random.Random(0)
    found = 0
    for _ in range(40):
        rank = draw.randrange(plan.world)
        program = list(programs[rank])
        at = draw.choice(
            [n for n, e in enumerate(program) if e.kind in ("send", "recv", "collective")]
        )
        kind = draw.choice(["lost", "other route"])
        if kind == "lost":
            del program[at]
        else:
            other = "mpi" if program[at].backend == "gloo" else "gloo"
            route = program[at].route._replace(backend=other)
            program[at] = program[at]._replace(route=route)
        changed = [program if r == rank else own for r, own in enumerate(programs)]
        assert prove_in_order([*map(iter, changed)], members) is None
        assert run_machine(changed, members, ROUTES).problems
        found += 1
    assert found == 40


def test_random_plans_are_proved_by_their_routes():
    for seed in range(30):
        plan = random_plan(random.Random(seed))
        first = next(judged(plan))
        assert (first.semantics, first.proof.problems) == (ROUTES, []), seed
