"""Is the memory of a plan predicted once, kept, shown, and refused where it does not fit?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hires.cli.planning import Planner
from hires.core.config.model_config import ModelConfig
from hires.core.config.optimizer_config import OptimizerConfig
from hires.core.config.run_config import MemoryConfig, RunConfig
from hires.core.errors import ConfigError, PlanError, RunError
from hires.core.store.files import cache_dir
from hires.core.units import MIB
from hires.plan.memory import RankMemory
from hires.plan.planner import make_plan
from hires.plan.search.layout_search import Budget
from tests.cli.conftest import SMALL

MODEL = ModelConfig(depth=18, classes=10)
CONFIG = RunConfig(image=32, batch=4, model=MODEL)


def memory(*sizes: int) -> RankMemory:
    """Memory of a rank, its parts in 2 MiB each."""
    return RankMemory(*(2 * MIB * number for number in sizes))


class Process:
    """Predicts 200 MiB for every microbatch of a step, a tenth with recomputation."""

    def __init__(self, graph) -> None:
        self.graph = graph
        self.asked = 0

    def trace(self, config):
        return self.graph

    def footprint(self, config, plan):
        self.asked += 1
        kept = 100 // config.parallel.microbatches
        if config.memory.checkpoint != "none":
            kept //= 10
        return [memory(1, 2, 3, kept, 4).to_dict()] * plan.ranks_per_replica


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def forecast(config: RunConfig, process) -> object:
    plan = make_plan(config, process.graph)
    Planner(process).add_memory(config, plan, Budget())
    return plan


def test_second_forecast_comes_from_the_cache(graph, cache):
    process = Process(graph)
    first = forecast(CONFIG, process)
    second = forecast(CONFIG, process)
    assert first.memory == second.memory == [memory(1, 2, 3, 100, 4).to_dict()]
    assert process.asked == 1
    [file] = (cache / "hires" / "memory").iterdir()
    for asked, damaged in enumerate(('{"half', "[1]", '[{"peak_bytes": 1}]'), start=2):
        file.write_text(damaged)
        assert forecast(CONFIG, process).memory == first.memory
        assert process.asked == asked


def test_limit_is_no_part_of_the_key_but_checkpoint_is(graph):
    process = Process(graph)
    forecast(CONFIG, process)
    limited = RunConfig(image=32, batch=4, model=MODEL, memory=MemoryConfig(limit="1GiB"))
    forecast(limited, process)
    assert process.asked == 1
    again = MemoryConfig(checkpoint="stage")
    forecast(RunConfig(image=32, batch=4, model=MODEL, memory=again), process)
    assert process.asked == 2


def test_cache_that_cannot_be_written_is_no_error(graph, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert forecast(CONFIG, Process(graph)).memory


def test_cache_folder_follows_the_standard(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path.home() / ".cache" / "hires"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "hires"


def test_step_that_a_rank_cannot_run_is_an_error(graph):
    # It was a warning, and the run died in its first step.
    class Fails(Process):
        def footprint(self, config, plan):
            raise PlanError("a rank cannot run its step: RuntimeError: view (in layer1 (view))")

    plan = forecast(CONFIG, Fails(graph))
    assert not plan.ok
    assert [f.text for f in plan.findings if f.severity == "error"] == [
        "a rank cannot run its step: RuntimeError: view (in layer1 (view))"
    ]


def test_loss_that_a_rank_cannot_find_is_an_error_of_its_key(graph):
    class Fails(Process):
        def footprint(self, config, plan):
            raise PlanError("loss.target='m:bad': m has no function 'bad'")

    [found] = [f for f in forecast(CONFIG, Fails(graph)).findings if f.severity == "error"]
    assert found.key == "loss.target"


def test_forecast_that_fails_is_a_warning(graph):
    process = Process(graph)

    def fail(config, plan):
        raise RunError("no fake kernel")

    process.footprint = fail
    plan = forecast(CONFIG, process)
    assert plan.ok
    assert plan.memory == []
    assert [f.severity for f in plan.findings] == ["warning"]
    assert "no fake kernel" in plan.findings[0].text


def test_plan_that_does_not_fit_names_every_single_change_that_would(graph):
    config = RunConfig(image=32, batch=4, model=MODEL, memory=MemoryConfig(limit="140MiB"))
    plan = forecast(config, Process(graph))
    [finding] = plan.findings
    assert not plan.ok
    assert finding.key == "memory.limit"
    assert finding.text == (
        "rank 0 needs 220.0 MiB, predicted, which is more than memory.limit=140MiB; "
        "parallel.microbatches=2 (120.0 MiB), or memory.checkpoint=block (40.0 MiB), or "
        "memory.checkpoint=stage (40.0 MiB) would fit"
    )


def test_stages_that_fit_are_found_beyond_the_next_one_and_have_a_plan(graph):
    process = Process(graph)

    def footprint(config, plan):
        return [memory(400 // len(plan.stages), 0, 0, 0, 0).to_dict()] * plan.ranks_per_replica

    process.footprint = footprint
    config = RunConfig(image=32, batch=1, model=MODEL, memory=MemoryConfig(limit="300MiB"))
    [finding] = forecast(config, process).findings
    assert finding.text == (
        "rank 0 needs 800.0 MiB, predicted, which is more than memory.limit=300MiB; "
        "parallel.stages=3 (266.0 MiB) would fit"
    )


@pytest.mark.usefixtures("traced")
def test_plan_draws_the_memory_and_exits_3_where_it_does_not_fit(hires):
    answer = hires("plan", *SMALL, "memory.limit=2MiB")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert "memory of a rank" in lines
    assert any("[PPPGOOAAABBB............]" in line for line in lines)
    assert any("memory.limit, 2.0 MiB" in line for line in lines)
    answer = hires("plan", *SMALL, "memory.limit=1MB", "--json")
    assert answer.code == 3
    facts = json.loads(answer.out)
    assert facts["memory"][0]["peak_bytes"] == 1 << 20
    assert any("memory.limit=1MB" in finding["text"] for finding in facts["findings"])


@pytest.mark.usefixtures("traced")
def test_run_that_does_not_fit_is_not_started(hires):
    answer = hires("run", *SMALL, "memory.limit=1MB")
    assert answer.code == 3
    assert "memory.limit" in answer.err
    assert not Path("results").exists()


@pytest.mark.parametrize("limit", ["lots", "4 Gigs", "-1", 0, True, [4]])
def test_limit_that_is_no_size_is_refused(limit):
    with pytest.raises(ConfigError, match=r"memory.limit=.* is no size; give a number and a unit"):
        MemoryConfig(limit=limit)


@pytest.mark.parametrize("limit", [4, 4.5, "4", "4096"])
def test_limit_without_a_unit_is_refused(limit):
    # memory.limit=4 was 4 bytes, and every layout too large.
    with pytest.raises(ConfigError, match=rf"has no unit; write memory.limit={limit}GiB or "):
        MemoryConfig(limit=limit)
    assert MemoryConfig(limit=f"{limit}B").limit == f"{limit}B"


@pytest.mark.parametrize(
    ("limit", "offers"),
    [
        (4e9, "4GB or 3.73GiB (4000000000B for bytes)"),
        (8 << 30, "8.59GB or 8GiB (8589934592B for bytes)"),
        ("2000000", "2MB or 2MiB (2000000B for bytes)"),
    ],
)
def test_limit_in_bytes_is_offered_with_a_unit(limit, offers):
    with pytest.raises(ConfigError) as caught:
        MemoryConfig(limit=limit)
    assert str(caught.value).endswith(f"write memory.limit={offers}")


def test_keys_that_do_not_matter_share_a_forecast_and_time_that_is_used_up_makes_none(graph):
    process = Process(graph)
    plan = make_plan(CONFIG, graph)
    Planner(process, 0).add_memory(CONFIG, plan)
    assert plan.memory == []
    assert "no time is left for it; plan again, which uses what is kept" in plan.findings[-1].text
    forecast(CONFIG, process)
    other = RunConfig(
        image=32, batch=4, model=MODEL, seed=5, steps=40, optimizer=OptimizerConfig(lr=0.5)
    )
    plan = make_plan(other, graph)
    Planner(process, 0).add_memory(other, plan)
    assert plan.ok
    assert plan.memory
    assert process.asked == 1
