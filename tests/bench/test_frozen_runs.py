"""Are runs that were frozen elsewhere judged, or refused with the reason?"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from hires.bench import frozen_runs
from hires.bench.frozen_runs import check_folder, compare_losses, require_fit, run_folders
from hires.bench.gpu_runs import NotRunError, Runs
from hires.core.errors import ConfigError, HiresError, RunError
from hires.core.store import records, rundir
from hires.core.store.rundir import RunDir
from hires.plan.plan import Plan


@pytest.fixture(scope="module")
def frozen(tmp_path_factory) -> Path:
    """A run of two tiles on the CPU that was never started."""
    runs = Runs(tmp_path_factory.mktemp("there"), "cpu")
    config = runs.config("c", {"parallel": {"tiles": [1, 2]}, "image": 32, "steps": 2})
    plan = frozen_runs.Plan.from_dict(records.read_plan(runs.freeze(config)))
    shutil.rmtree(runs.folder / "c")
    return rundir.freeze(config, plan.to_dict(), ["hires", "run"])


def held(folder: Path) -> tuple[frozen_runs.RunConfig, Plan]:
    return records.read_config(folder), Plan.from_dict(records.read_plan(folder))


def test_folders_are_runs_or_hold_them(frozen, tmp_path):
    assert run_folders("--runs", [str(frozen)]) == [frozen]
    assert run_folders("--runs", [str(frozen.parent)]) == [frozen]
    with pytest.raises(ConfigError, match=r"--runs .* is no run folder and holds none; `hires run"):
        run_folders("--runs", [str(tmp_path)])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(200)
def test_copy_runs_and_the_folder_stays_as_it_is(frozen, tmp_path):
    before = {file: file.read_bytes() for file in frozen.rglob("*")}
    passed, found = check_folder(Runs(tmp_path, "cpu"), frozen, 100.0)
    assert passed, found
    assert "losses of 2 steps differ from the CPU by 0.0e+00 of 1e-10" in found
    assert {file: file.read_bytes() for file in frozen.rglob("*")} == before


def test_reference_is_not_compiled_by_the_compiler_under_test(frozen, tmp_path):
    config = records.read_config(frozen)
    config.engine.compile = "stage"
    assert frozen_runs._on_cpu(config, tmp_path).engine.compile == "off"


def test_run_of_another_device_or_of_more_gpus_is_refused(frozen):
    config, plan = held(frozen)
    with pytest.raises(RunError, match=r"frozen for device=cpu; use device=cuda cluster\.gpus=1"):
        require_fit(config, plan, "cuda", 1)
    plan.device = "simulated"
    with pytest.raises(NotRunError, match=r"^frozen for device=simulated; use --device simulated$"):
        require_fit(config, plan, "cpu", 0)
    plan.device = "cuda"
    for rehearsal in ("cpu", "simulated"):
        with pytest.raises(NotRunError, match="--device cuda on a machine with a GPU"):
            require_fit(config, plan, rehearsal, 0)
    require_fit(config, plan, "cuda", 1)  # both ranks share the GPU
    config.cluster.gpus = 2
    with pytest.raises(RunError, match="frozen for 2 GPUs with gloo, and this machine shows 1"):
        require_fit(config, plan, "cuda", 1)
    config.cluster.gpus, plan.backend = 1, "nccl"
    with pytest.raises(RunError, match="frozen for 2 GPUs with nccl"):
        require_fit(config, plan, "cuda", 1)
    config.launcher.name = "slurm"
    with pytest.raises(RunError, match=r"frozen for other machines \(slurm\); use launcher=local"):
        require_fit(config, plan, "cuda", 2)


@pytest.mark.parametrize(
    ("file", "old", "new", "why"),
    [
        (
            "plan.json",
            '"schema": ',
            '"schema": 9',
            r"plan\.json has schema 9\d, .* make the run again",
        ),
        ("plan.json", "{", "", r"plan\.json is damaged"),
        ("config.yaml", "batch: 4", "bathc: 4", "is of another hires, or was edited"),
        ("plan.json", '"world": 2', '"world": 3', "edited"),
        ("config.yaml", "batch: 4", "batch: 2", "edited"),
    ],
)
def test_damaged_folder_is_refused_before_any_rank_starts(
    frozen, tmp_path, monkeypatch, file, old, new, why
):
    monkeypatch.setattr(Runs, "launch", lambda *args: pytest.fail("it started"))
    copy = tmp_path / frozen.name
    shutil.copytree(frozen, copy)
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1))
    if why != "edited":  # as another hires would have frozen it
        (copy / "frozen.json").unlink()
    with pytest.raises(HiresError, match=why):
        check_folder(Runs(tmp_path, "cpu"), copy, 1.1)


def test_config_is_read_without_yaml_if_it_is_the_frozen_one(frozen, tmp_path, monkeypatch):
    monkeypatch.setattr(frozen_runs.reading, "HAS_YAML", False)
    assert frozen_runs._readable(frozen)[0] == records.read_config(frozen)
    copy = tmp_path / frozen.name
    shutil.copytree(frozen, copy)
    planned = json.loads((copy / "planned.json").read_text())
    planned["config"]["batch"] = 8
    (copy / "planned.json").write_text(json.dumps(planned))
    with pytest.raises(RunError, match="cannot be read without PyYAML"):
        frozen_runs._readable(copy)


@pytest.fixture
def run(tmp_path):
    """Makes a run of some losses."""

    def make(name: str, *losses: float, skipped: int | None = None) -> RunDir:
        made = RunDir(tmp_path / name, 0)
        made.attempt_dir.mkdir(parents=True)
        lines = (
            {"kind": "step", "rank": 0, "step": n, "loss": x, "skipped": n == skipped}
            for n, x in enumerate(losses)
        )
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (made.attempt_dir / "metrics.jsonl").write_text(text)
        return made

    return make


def test_losses_beyond_the_bound_of_their_precision_fail(run, frozen):
    config, plan = held(frozen)
    exact = run("exact", 2.0, 1.5, 1.0)
    near, far = run("near", 2.0, 1.5 + 3e-10, 1.0), run("far", 2.0, 1.5 + 5e-10, 1.0)
    assert compare_losses(near, exact, config, plan)[0]
    assert not compare_losses(far, exact, config, plan)[0]
    assert not compare_losses(run("nan", 2.0, math.nan), exact, config, plan)[0]
    assert not compare_losses(run("none"), exact, config, plan)[0]
    config.precision.name = "fp16"
    assert compare_losses(far, exact, config, plan)[0]
    passed, found = compare_losses(run("over", 2.0, 9.0, skipped=0), exact, config, plan)
    assert passed
    assert "losses of 1 steps" in found
    assert "then step 1 overflowed" in found
