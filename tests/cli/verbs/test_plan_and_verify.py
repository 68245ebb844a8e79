"""``hires plan`` shows the plan that a run would freeze, with its proof; ``hires verify`` tells
equal from unequal and leaves nothing behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hires.cli.show_plan import finding_lines, memory_lines, node_lines
from hires.core.gradient_orders import ORDERS
from hires.core.store.ends import End
from hires.core.units import MIB, size
from hires.plan.memory import LIBRARIES_BYTES, RankMemory, Room
from hires.plan.plan import Finding, Plan
from tests.helpers.commands import SMALL
from tests.helpers.small_plans import plan_of

pytestmark = pytest.mark.usefixtures("traced")


def test_plan_shows_grid_time_line_messages_and_verdict(hires):
    answer = hires("plan", *SMALL, "parallel=sp+lp", "parallel.tiles=[1,2]")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[:3] == ["placement (ranks)", "  stage 0  stage 1", "  [ 0 1 ]  [ 2 ]"]
    assert "  stage 0  F0 .  .  B0" in lines
    assert any(line.split()[:1] == ["halo"] for line in lines)
    assert "deadlock-free" in lines[-1]
    assert not Path("results").exists()


def test_json_is_what_plan_json_holds_with_the_proof_if_asked_for(hires):
    facts = json.loads(hires("plan", *SMALL, "parallel=sp", "--json").out)
    assert facts["world"] == 2
    assert json.loads(json.dumps(Plan.from_dict(facts).to_dict())) == facts
    facts = json.loads(hires("plan", *SMALL, "parallel=sp", "--prove", "--json").out)
    proof = facts["proof"]
    assert (proof["backends"], proof["ok"]) == (["gloo", "shm"], True)
    assert facts["verdict"] == (
        f"deadlock-free, {proof['messages']} messages and {proof['collectives']} collectives a step"
    )
    words = ("plan", *SMALL, "parallel=pp", "parallel.microbatches=3")
    answer = hires(*words)
    assert answer.code == 3
    assert answer.out.startswith("findings\n  error: batch=4 does not divide")
    assert "use batch=3 or batch=6" in answer.out
    answer = hires(*words, "--prove", "--json")
    assert (answer.code, json.loads(answer.out)["proof"]) == (3, None)


def test_step_is_predicted_in_each_order_of_gradient_sums_where_one_is_named(hires, monkeypatch):
    monkeypatch.setattr("hires.plan.updates.ALONE_BYTES", 2**10)
    words = ("plan", *SMALL, "parallel=dp", "comm.gradient_order=chain")
    facts = json.loads(hires(*words, "--json").out)["gradient_orders"]
    assert [*facts["step_s"]] == [*ORDERS]
    assert min(facts["step_s"].values()) > 0
    title, line, _ = hires(*words).out.splitlines()[-3:]
    assert (title, line.split()[::3]) == ("predicted step by comm.gradient_order", [*ORDERS])
    assert "gradient_orders" not in json.loads(hires(*words[:-1], "--json").out)


def test_memory_is_drawn_in_proportion_and_alike_ranks_and_nodes_stand_on_one_line():
    def needs(mib, **facts):
        return RankMemory(mib * MIB, 0, 0, mib * MIB, 0, **facts).to_dict()

    memory = [needs(8), needs(8), needs(4)]
    for limit, full in ((None, "16.0 MiB"), (32 * MIB, "memory.limit, 32.0 MiB")):
        lines = memory_lines(memory, limit)
        bars = [line.split()[:3] for line in lines[2:4]]
        length = 12 if limit is None else 6
        assert bars[0] == ["0-1", f"[{('P' * length + 'A' * length).ljust(24, '.')}]", "16.0"]
        assert bars[1][:2] == ["2", f"[{('P' * (length // 2) + 'A' * (length // 2)):.<24}]"]
        assert lines[-1].endswith(f"a full bar is {full}")
    assert "PPP>]" in memory_lines(memory, 8 * MIB)[2]  # more than there is
    start = memory_lines([needs(8, start_bytes=20 * MIB), needs(9)], why="of a kernel")
    assert start[-1] == "the start needs up to 20.0 MiB: of a kernel"
    plan = replace(plan_of(stages=3, replicas=2), memory=[needs(25)] * 3)
    two, one = (ranks * (50 * MIB + LIBRARIES_BYTES) for ranks in (2, 1))
    assert node_lines(Room(None, 2 * MIB, nodes=4), plan) == [
        f"nodes 0-1: 2 ranks need {size(two)} of 2.0 MiB",
        f"nodes 2-3: 1 rank needs {size(one)} of 2.0 MiB",
        f"all 4 nodes together: {size(2 * two + 2 * one)}",
    ]
    kinds = [Finding(severity, "k", "t") for severity in ("note", "error", "warning")]
    assert [line[0] for line in finding_lines(kinds)] == ["e", "w", "n"]


@pytest.fixture
def rank_0_finds(monkeypatch):
    """Stands for the ranks: writes verify.json and remembers the frozen config."""
    seen = {}

    def finds(worst: float, noise: float | None = None, verdict: str | None = None):
        def launch(path, attempt, *, args, on_line):
            assert args == ("--verify",)
            config = yaml.safe_load((path / "config.yaml").read_text())
            seen.update(path=path, precision=config["precision"]["name"])
            errors = {"output": 1e-13, "gradients": worst, "running_stats": None}
            allowed = max(1e-10, min(10 * (noise or 0), 1e-6))
            each = {}
            for kind, error in errors.items():
                facts = {"name": f"{kind}/a", "error": error, "noise": noise, "allowed": allowed}
                facts |= {"bound": 1e-10, "verdict": "equal"}
                each[kind] = None if error is None else facts
            ok = worst <= allowed
            answer = {
                "ok": ok,
                "max_rel_err": worst,
                "errors": errors,
                "worst": each,
                "undecided": [],
            }
            answer |= {"verdict": verdict or ("equal" if ok else "not equal")}
            answer |= {"decisive": each["gradients"], "precision": seen["precision"]}
            answer |= {"by_noise": ["gradients/a"] if noise else []}
            (path / f"a{attempt}" / "verify.json").write_text(json.dumps(answer))
            return End("done" if ok else "failed", exit_codes={0: 0 if ok else 1})

        monkeypatch.setattr("hires.launcher.kinds.this_machine.launch", launch)
        return seen

    return finds


def test_error_and_noise_decide_the_verdict_and_no_folder_is_left(hires, rank_0_finds):
    for errors, code, text in (
        ((3e-12,), 0, "equal to one process: 3.00e-12, allowed 1e-10"),
        ((4e-3,), 1, "NOT equal to one process: 4.00e-03, allowed 1e-10 (gradients/a)"),
        ((2e-9, 1e-9), 0, "allowed ten times their float64 noise"),
        # A layout was "NOT equal" though its error was below the noise of float64.
        ((3e-6, 8e-6, "undecided"), 2, "float64 itself differs by 8.00e-06 in gradients/a"),
    ):
        seen = rank_0_finds(*errors)
        answer = hires("verify", *SMALL, "parallel=sp")
        assert (answer.code, text in answer.out) == (code, True), answer.out
        assert ("NOT equal" in answer.out, seen["precision"]) == (code == 1, "fp64")
    rank_0_finds(1e-12)
    assert json.loads(hires("verify", *SMALL, "precision=bf16", "--json").out)["ok"] is True
    assert (seen["precision"], seen["path"].exists()) == ("bf16", False)
    assert "note: parallel=auto chose" in hires("verify", *SMALL, "parallel=auto", "ranks=2").err
    # Codes as coarse as these would hide any fault.
    answer = hires("verify", *SMALL, "parallel=sp", "comm.codec=fp8")
    assert (answer.code, "verify cannot tell a fault" in answer.err) == (2, True)
    answer = hires("verify", *SMALL, "parallel=sp", "comm.codec=topk")
    assert (answer.code, "from what these codes leave out" in answer.err) == (2, True)
    words = ("comm.codec={gradient: fp8}", "--json")
    assert json.loads(hires("verify", *SMALL, "parallel=sp", *words).out)["ok"] is True
    assert not Path("results").exists()


def test_verification_that_fails_or_compares_nothing_is_no_success(hires, fake_ranks):
    for behaviour, text in (("raise", "this rank was told to fail"), ("ok", "without comparing")):
        fake_ranks({"0": behaviour})
        answer = hires("verify", *SMALL)
        assert (answer.code, text in answer.err, answer.out) == (1, True, "")
    words = ("parallel=pp", "parallel.microbatches=3", "--json")
    assert json.loads(hires("verify", *SMALL, *words).out)["error"]["exit_code"] == 3
