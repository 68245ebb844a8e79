"""Does ``hires plan`` show the same plan that a run would freeze?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hires.cli.compose.compose_config import compose
from hires.plan.checks import check_colours
from hires.plan.plan import Plan
from tests.cli.conftest import SMALL

pytestmark = pytest.mark.usefixtures("traced")


def test_plan_shows_grid_time_line_messages_and_verdict(hires):
    answer = hires("plan", *SMALL, "parallel=sp+lp", "parallel.tiles=[1,2]")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[:3] == ["placement (ranks)", "  stage 0   stage 1", "  [ 0 1 ]   [ 2 ]"]
    assert "  stage 0  F0 .  .  B0" in lines
    assert any(line.split()[:1] == ["halo"] for line in lines)
    assert "deadlock-free" in lines[-1]
    assert not Path("results").exists()


def test_json_is_what_plan_json_holds(hires):
    facts = json.loads(hires("plan", *SMALL, "parallel=sp", "--json").out)
    assert facts["world"] == 2
    assert Plan.from_dict(facts).to_dict() == facts


def test_infeasible_plan_is_shown_with_all_findings_and_exits_3(hires):
    answer = hires("plan", *SMALL, "parallel=pp", "parallel.microbatches=3")
    assert answer.code == 3
    assert answer.out.startswith("findings\n  error: batch=4 does not divide")
    assert "parallel.microbatches=2" in answer.out


PIPELINE = ("parallel=pp", "parallel.microbatches=1", "--prove")


def test_proof_is_told_for_each_semantics_and_order(hires):
    answer = hires("plan", *SMALL, *PIPELINE)
    assert answer.code == 0
    title, *lines = answer.out.split("\n\n")[-1].splitlines()
    assert title == "proof (the routes of this plan use gloo)"
    assert [line.strip().split("  ")[0] for line in lines[1:7]] == [
        "routes",
        "rendezvous",
        "mailboxes",
        "separate streams",
        "pair streams",
        "pair streams",
    ]
    assert all(" deadlock-free " in line for line in lines[1:6])
    assert "with the sends before" in lines[5]
    # Receives ahead are harmless with gloo; where both ways share a stream they stop both ranks.
    assert "one action ahead" in lines[6]
    assert " fails " in lines[6]
    cycle = [line.strip() for line in lines[7:]]
    assert cycle[0].startswith("deadlock: the stream of rank 0 must first receive the gradient of ")
    assert cycle[0].endswith(" in B0 from rank 1")
    assert cycle[1].startswith("rank 1 waits for ")
    assert cycle[1].endswith(" in F0 from rank 0")


def test_proofs_are_part_of_the_json_if_asked_for(hires):
    facts = json.loads(hires("plan", *SMALL, *PIPELINE, "--json").out)
    first, met, mailed, separate, joined, ahead = proofs = facts["proofs"]
    assert [proof["decides"] for proof in proofs] == [True, True, False, False, False, False]
    assert [proof["ok"] for proof in proofs] == [True, True, True, True, True, False]
    assert [proof["backends"] for proof in proofs] == [
        ["gloo"],
        ["gloo", "mpi", "shm", "cma"],
        ["gloo", "mpi", "shm", "cma"],
        ["nccl", "nccl_direct"],
        [],
        [],
    ]
    assert facts["verdict"] == (
        f"deadlock-free, {first['messages']} messages and {first['collectives']} collectives a step"
    )
    assert first["seconds"] > 0
    assert not any(one["problems"] for one in (first, met, mailed, separate, joined))
    assert len(ahead["problems"]) == 1


def test_plan_that_could_not_be_made_has_no_proof(hires):
    answer = hires("plan", *SMALL, "parallel=pp", "parallel.microbatches=3", "--prove", "--json")
    assert answer.code == 3
    assert json.loads(answer.out)["proofs"] == []


def test_memory_is_told_for_every_node(hires):
    words = ("plan", *SMALL, "parallel=sp", "parallel.tiles=[3,1]", "launcher=mpirun")
    words = (*words, "launcher.hosts=[a,b]", "cluster.memory=1GiB")
    lines = hires(*words).out.splitlines()
    start = lines.index("memory of a node, libraries included")
    assert lines[start + 1].strip() == "node 0: 2 ranks need 642.0 MiB of 1.0 GiB"
    assert lines[start + 2].strip() == "node 1: 1 rank needs 321.0 MiB of 1.0 GiB"
    facts = json.loads(hires(*words, "--json").out)
    assert [node["ranks"] for node in facts["nodes"]] == [[0, 1], [2, 2]]
    answer = hires(*words[:-1], "cluster.memory=400MiB")
    assert answer.code == 3
    assert "2 ranks on one node need 642.0 MiB" in answer.out
    assert "cluster.memory=400MiB" in answer.out


def test_colours_of_grey_images_have_no_effect_and_a_note(hires):
    words = ["model=resnet18", "image=32", "batch=4", "augment.hue=0.1", "augment.saturation=0.2"]
    note = "no effect of augment.hue=0.1 and augment.saturation=0.2 with model.channels=1"
    answer = hires("plan", *words, "model.channels=1")
    assert answer.code == 0, answer.err
    assert f"note: {note}" in " ".join(answer.out.split())
    for more in (
        [],
        ["model.channels=1", "augment.hue=0", "augment.saturation=0"],
    ):
        assert check_colours(compose([*words, *more])) == []
    [finding] = check_colours(compose([*words[:-1], "model.channels=4"]))
    assert finding.text.startswith("no effect of augment.hue=0.1 with model.channels=4: ")
    assert (finding.severity, finding.key) == ("note", "augment.hue")
