"""Does a run that was stopped go on as if it had not been?"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from hires.core.errors import PREEMPTED
from hires.core.ranks.world import World
from hires.core.store import attempts, checkpoints, file_names, records
from hires.core.store.reading import read_lines
from hires.engine.optimizer import OPTIMIZERS, Optimizer
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import (
    STEPS,
    attempt,
    crashed_attempt,
    losses,
    make,
    mean_losses,
    numbered,
)

pytestmark = pytest.mark.dist

FP32: dict[str, Any] = {"precision": {"name": "fp32"}}
DROPS = {"name": "custom", "target": "tests.helpers.custom_nets:drops", "classes": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "sp": {"parallel": {"name": "sp", "tiles": [2, 1]}},
    "pp gpipe": {"parallel": {"name": "pp", "stages": 2, "microbatches": 2}},
    "sp+gems": {
        "parallel": {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems"},
    },
    "dp": {"parallel": {"name": "dp", "replicas": 2}},
    "dropout": {"model": DROPS},
    "dropout in a pipeline": {
        "model": DROPS,
        "parallel": {"stages": 2, "microbatches": 2},
        "memory": {"checkpoint": "block"},
    },
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stopped_run_goes_on_with_the_very_same_losses(layout, tmp_path):
    whole = make(tmp_path / "whole", **FP32, **LAYOUTS[layout])
    assert set(attempt(whole)) == {0}
    stopped = make(tmp_path / "stopped", **FP32, **LAYOUTS[layout])
    assert set(attempt(stopped, stop_at=4)) == {PREEMPTED}
    assert max(step for step, _ in losses(stopped, 0)) == 3
    assert set(attempt(stopped)) == {0}
    assert losses(stopped, 0, 1) == losses(whole, 0)  # bit for bit: no tolerance
    record = records.read_record(stopped)
    assert record is not None
    assert record["state"] == "done"
    assert record["resumed"] == {"step": 4, "checkpoint": "step000004", "attempt": 0}
    assert record["loss"] == records.read_record(whole)["loss"]
    assert [sample["step"] for sample in record["samples"]] == [4, 5, 6, 7]
    assert {"step": 4, "why": "warm-up"} in record["throughput"]["discarded"]


class Averaging(Optimizer):
    """Keeps two numbers for each parameter, the name of one of which begins the other's."""

    keys = ("lr",)
    kept: ClassVar = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like}

    def update(self, parameters, gradients, kept) -> None:
        pairs = zip(kept["exp_avg"], kept["exp_avg_sq"], strict=True)
        for parameter, gradient, (mean, square) in zip(parameters, gradients, pairs, strict=True):
            mean.lerp_(gradient, 0.1)
            square.lerp_(gradient.square(), 0.01)
            parameter -= self.settings["lr"] * mean / (square.sqrt() + 1e-3)


def averaging(world: World, folder: str, number: int, stop_at: int | None) -> int:
    OPTIMIZERS._items["sgd"] = Averaging
    return numbered(world, folder, number, stop_at)


def test_optimiser_that_keeps_several_numbers_gets_each_of_them_back(tmp_path):
    whole, stopped = make(tmp_path / "whole", **FP32), make(tmp_path / "stopped", **FP32)
    run_ranks(averaging, 1, str(whole), 0, None)
    assert run_ranks(averaging, 1, str(stopped), 0, 4) == [PREEMPTED]
    run_ranks(averaging, 1, str(stopped), attempts.next_attempt(stopped), None)
    assert losses(stopped, 0, 1) == losses(whole, 0)


def test_checkpoint_of_one_layout_resumes_in_another(tmp_path):
    two = {"microbatches": 2}
    whole = make(tmp_path / "whole", parallel=two)
    attempt(whole)
    tiles = make(tmp_path / "tiles", parallel={"tiles": [2, 1], **two})
    assert set(attempt(tiles, stop_at=3)) == {PREEMPTED}
    pipeline = {"stages": 3, "microbatches": 2}
    stages = make(tmp_path / "stages", parallel=pipeline, checkpoint={"resume": str(tiles)})
    assert set(attempt(stages, stop_at=6)) == {PREEMPTED}
    last = checkpoints.place(stages, 6)
    single = make(tmp_path / "single", parallel=two, checkpoint={"resume": str(last)})
    assert set(attempt(single)) == {0}
    parts = mean_losses(tiles, 0) + mean_losses(stages, 0) + mean_losses(single, 0)
    assert parts == pytest.approx(mean_losses(whole, 0), rel=1e-10)
    record = records.read_record(single)
    assert record["state"] == "done"
    assert record["resumed"] == {"step": 6, "checkpoint": str(last), "attempt": None}


def test_checkpoint_holds_every_layer_once_as_plain_torch_names_it(tmp_path):
    gems = {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems", "replicas": 2}
    run = make(tmp_path, steps=3, batch=4, parallel=gems, checkpoint={"every": 3})
    attempt(run)
    folder = checkpoints.place(run, 3)
    held = [load_file(folder / f"stage{stage:02d}.safetensors") for stage in range(3)]
    names = [name for tensors in held for name in tensors]
    params = records.read_plan(run)["graph"]["params"]
    assert len(names) == len(set(names))
    assert {n for n in names if not n.endswith("num_batches_tracked")} == set(params)
    assert all(
        list(tensor.shape) == params[name]["shape"]
        for tensors in held
        for name, tensor in tensors.items()
        if name in params
    )
    momenta = load_file(folder / "momentum00.safetensors")
    assert momenta.keys() < held[0].keys()
    assert sorted(path.name for path in folder.glob("rank*")) == [
        f"rank{rank:04d}.safetensors" for rank in range(8)
    ]


def test_saves_are_regular_and_only_the_latest_are_kept(tmp_path):
    run = make(tmp_path, checkpoint={"every": 2, "keep": 2})
    attempt(run)
    names = sorted(path.name for path in (run / checkpoints.FOLDER).iterdir())
    assert names == ["step000006", "step000008"]


@pytest.mark.parametrize(
    ("saving", "names"),
    [
        ({"every": 3, "keep": 3}, ["step000003", "step000006", "step000008"]),
        ({"every": 3, "keep": 3, "at_end": "never"}, ["step000003", "step000006"]),
        ({"at_end": "always"}, ["step000008"]),
        ({}, []),
    ],
)
def test_training_saves_its_last_state_where_it_saves_at_all(tmp_path, saving, names):
    run = make(tmp_path, checkpoint=saving)
    attempt(run)
    assert sorted(path.name for path in run.glob(f"{checkpoints.FOLDER}/*")) == names


def test_complete_run_that_is_repeated_begins_anew(tmp_path):
    run = make(tmp_path, checkpoint={"every": 3})
    attempt(run)
    attempt(run)
    assert losses(run, 1) == losses(run, 0)
    assert records.read_record(run)["resumed"] is None
    there, damaged = checkpoints.whole_checkpoints(run)
    assert [(c.attempt, c.step) for c in there] == [(1, 8), (1, 6)]
    assert not damaged


def test_run_that_only_lacks_its_record_is_completed(tmp_path):
    run = make(tmp_path, checkpoint={"every": 4})
    attempt(run)
    before = records.read_record(run)
    (run / "record.json").unlink()
    assert attempt(run) == [0]
    assert losses(run, 1) == {}
    record = records.read_record(run)
    assert (record["state"], record["loss"]) == ("done", before["loss"])


def test_run_that_never_resumes_begins_at_step_0(tmp_path):
    run = make(tmp_path, checkpoint={"resume": "never"})
    assert attempt(run, stop_at=4) == [PREEMPTED]
    assert attempt(run) == [0]
    assert len(losses(run, 1)) == STEPS


@pytest.mark.parametrize("harm", ["flipped", "missing", "swapped"])
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(harm, tmp_path):
    layout = {"parallel": {"stages": 2}}
    whole = make(tmp_path / "whole", **layout)
    attempt(whole)
    run = make(tmp_path / "run", checkpoint={"every": 2}, **layout)
    assert set(attempt(run, stop_at=5)) == {PREEMPTED}
    damage(checkpoints.place(run, 5), harm)
    assert set(attempt(run)) == {0}
    assert min(step for step, _ in losses(run, 1)) == 4
    ours, theirs = losses(run, 1), losses(whole, 0)
    assert ours == {key: loss for key, loss in theirs.items() if key[0] >= 4}
    events = read_lines(file_names.attempt_dir(run, 1) / "events.jsonl")
    told = [event["text"] for event in events if event["event"] == "checkpoint_damaged"]
    assert told
    assert all("step000005" in text for text in told)
    assert records.read_record(run)["resumed"]["checkpoint"] == "step000004"


def damage(checkpoint: Path, harm: str) -> None:
    """Harms a checkpoint as a bad disk or a careless person would."""
    file = checkpoint / "stage01.safetensors"
    if harm == "flipped":
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    elif harm == "swapped":
        other = checkpoint / "momentum01.safetensors"
        data = file.read_bytes()
        file.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        file.unlink()


CRASHES = {"write": 2, "name": 2, "named": 4, "remove": 4}
"""Where a rank dies in the second save -> the step at which the run goes on."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("where", "begin"), CRASHES.items())
def test_crash_at_any_moment_of_a_save_leaves_a_whole_checkpoint(where, begin, tmp_path):
    saved = {"parallel": {"stages": 2}, "checkpoint": {"every": 2, "keep": 1}}
    run = make(tmp_path, **saved)
    crashed_attempt(run, where)
    there, damaged = checkpoints.whole_checkpoints(run)
    assert there[0].step == begin
    assert not damaged
    assert set(attempt(run)) == {0}
    assert min(step for step, _ in losses(run, 1)) == begin
    assert [path.name for path in (run / checkpoints.FOLDER).iterdir()] == ["step000008"]


def test_parameters_of_training_serve_inference(tmp_path):
    trained = make(tmp_path / "trained", checkpoint={"every": STEPS})
    attempt(trained)
    infer = {"name": "infer"}
    run = make(tmp_path / "infer", task=infer, checkpoint={"resume": str(trained)})
    assert attempt(run) == [0]
    assert records.read_record(run)["resumed"]["step"] == 0
    assert len(losses(run, 0)) == STEPS


def test_checkpoint_of_a_rewritten_network_has_the_networks_own_tensors(tmp_path):
    # Ranks hold folded weights alone; a second save reads those of the first.
    trained = make(tmp_path / "trained", checkpoint={"every": STEPS})
    attempt(trained)
    keys = {"checkpoint": {"resume": str(trained), "every": 3}, "parallel": {"tiles": [2, 1]}}
    run = make(tmp_path / "infer", task={"name": "infer"}, **keys)
    params = records.read_plan(run)["graph"]["params"]
    assert any(fact["recipe"] for fact in params.values())
    assert set(attempt(run, stop_at=4)) == {PREEMPTED}
    assert set(attempt(run)) == {0}
    before = load_file(checkpoints.place(trained, STEPS) / "stage00.safetensors")
    saved = sorted((run / checkpoints.FOLDER).iterdir())
    for folder in saved:
        after = load_file(folder / "stage00.safetensors")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_checkpoint_of_another_network_is_refused(tmp_path):
    saved = make(tmp_path / "saved")
    attempt(saved, stop_at=2)
    model = {"name": "preact_resnet", "n": 1, "classes": 7}
    run = make(tmp_path / "other", model=model, checkpoint={"resume": str(saved)})
    with pytest.raises(AssertionError, match="the checkpoint is of another network"):
        attempt(run)
