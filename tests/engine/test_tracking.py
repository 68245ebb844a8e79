"""Do trackers show the numbers of the run's own lines, also of a resumed run?"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hires.cli.data_keys import resolve_data
from hires.core import trackers
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.core.trackers import TRACKERS, TrackedRun, Tracker
from hires.data.make_data import make_data
from hires.engine.tracking import tracked
from hires.plan import hardware
from hires.trackers.mlflow import STORE
from hires.trackers.tensorboard import FOLDER
from tests.helpers.layouts import config_of
from tests.helpers.patience import until
from tests.helpers.saved import attempt, killed_attempt, lines_of, make, mean_losses, run_folder

Shown = dict[str, dict[int, float]]
"""Name -> step -> number, the last one of each step."""
BLOCK = 2**15
"""Of a file of W&B, which is a log of LevelDB."""


@pytest.fixture(scope="module", autouse=True)
def _no_network():
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "MLFLOW_TRACKING_URI",
            "MLFLOW_EXPERIMENT_NAME",
            "WANDB_API_KEY",
            "WANDB_MODE",
        ):
            patch.delenv(name, raising=False)
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        yield


def of_tensorboard(path: Path) -> tuple[Shown, list[str]]:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = events.EventAccumulator(str(path / FOLDER))
    accumulator.Reload()
    scalars = {name: accumulator.Scalars(name) for name in accumulator.Tags()["scalars"]}
    return {name: {one.step: one.value for one in held} for name, held in scalars.items()}, []


def of_mlflow(path: Path) -> tuple[Shown, list[str]]:
    client = pytest.importorskip("mlflow").MlflowClient((path.parents[1] / STORE).as_uri())
    experiment = client.get_experiment_by_name(path.parent.name)
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == path.name
    assert run.data.params["optimizer.clip_norm"] == "1.0"
    histories = {
        name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics
    }
    shown = {name: {one.step: one.value for one in held} for name, held in histories.items()}
    return shown, [run.info.status]


def of_wandb(path: Path) -> tuple[Shown, list[str]]:
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    shown, ends, runs = Shown(), [], []
    for file in sorted(path.glob("wandb/*/*.wandb")):
        for data in leveldb_records(file.read_bytes()):
            record = records.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            for item in record.history.item:
                name = "/".join(item.nested_key) or item.key
                shown.setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
            runs += [record.run] if kind == "run" else []
            ends += [str(record.exit.exit_code)] if kind == "exit" else []
    assert len({run.run_id for run in runs}) == 1
    assert {(run.project, run.display_name) for run in runs} == {(path.parent.name, path.name)}
    keys = {one.key: one.value_json for run in runs for one in run.config.update}
    assert json.loads(keys["optimizer.clip_norm"]) == 1.0
    return shown, ends


def leveldb_records(data: bytes) -> list[bytes]:
    """Returns the records of a log; the file may end in half of one."""
    found, place, whole = [], 7, b""  # behind the header of W&B
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4) and place <= len(data):  # all of a record, or the last part
            found.append(whole)
            whole = b""
    return found


READERS = {"tensorboard": of_tensorboard, "mlflow": of_mlflow, "wandb": of_wandb}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """A run whose first attempt was killed in step 3, behind the checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("tracked")
    make_data("textures", folder / "images", classes=1, count=6, size=[32, 32], seed=0)
    config = config_of(
        model={"name": "edsr", "blocks": 1, "width": 4, "scale": 2},
        data={"name": "pairs", "path": str(folder / "images"), "validation": 0.34},
        image=[16, 16], steps=6, parallel={"tiles": [2, 1]}, checkpoint={"every": 2},
        measure={"track": [name for name in READERS if not TRACKERS[name].lacks()], "warmup": 0},
        validate={"every": 2}, optimizer={"clip_norm": 1.0}, lr_schedule={"name": "cosine"},
    )  # fmt: skip
    path = run_folder(folder / "runs", resolve_data(config))
    killed_attempt(path, 3)
    second = int(time.time())  # TensorBoard sorts files of one second by their processes
    until(lambda: int(time.time()) > second)
    assert attempt(path) == [0, 0]
    return path


@pytest.mark.dist
@pytest.mark.parametrize("name", READERS)
def test_numbers_are_those_of_the_metrics_and_go_on_where_a_killed_run_resumes(name, resumed):
    if lacks := TRACKERS[name].lacks():
        pytest.skip(lacks)
    shown, ends = READERS[name](resumed)
    assert ends[-1:] == {"mlflow": ["FINISHED"], "wandb": ["0"]}.get(name, [])
    every = range(2 if name == "wandb" else 0, 6)  # W&B writes once a second
    assert [step for step in shown["train/loss"] if step in every] == [*every]
    own = [line for line in lines_of(resumed, 1, "step") if line["rank"] == 0]
    wanted = {"train/loss": dict(enumerate(mean_losses(resumed, 1), 2))}
    wanted["train/images_per_s"] = {line["step"]: 2 / line["step_s"] for line in own}
    for key in ("lr", "grad_norm"):
        wanted[f"train/{key}"] = {line["step"]: line[key] for line in own}
    for metric in ("loss", "psnr", "ssim"):
        lines = lines_of(resumed, 1, "validated")
        wanted[f"validation/{metric}"] = {line["step"]: line[metric] for line in lines}
    found = {key: shown[key] for key in shown if key.startswith(("train/", "validation/"))}
    later = {key: {n: one for n, one in held.items() if n >= 2} for key, held in found.items()}
    assert later == {key: pytest.approx(held) for key, held in wanted.items()}


@pytest.mark.dist
def test_libraries_of_trackers_are_no_memory_of_the_training(python, tmp_path):
    names = ",".join(name for name in READERS if not TRACKERS[name].lacks())
    words = ("model=preact_resnet", "model.depth=11", "image=16", "batch=2", "steps=4")
    answer = python("-m", "hires", "run", *words, f"measure.track=[{names}]")
    assert answer.code == 0, answer.err
    [record] = tmp_path.glob("results/*/*/record.json")
    [rank] = json.loads(record.read_text())["memory"]
    assert rank["peak_bytes"] - rank["predicted_bytes"] < 40 << 20  # all three are 97 MiB


def test_name_that_is_no_tracker_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"'tensorbord' is unknown; choose one of.* tensorboard"):
        from_dict({"measure": {"track": ["tensorbord"]}})


@pytest.mark.parametrize("name", [*TRACKERS])
def test_missing_package_is_named_before_a_rank_starts(name, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    [finding] = hardware.check_hardware(config_of(measure={"track": [name]}))
    assert f"pip install -e '.[{name}]'" in finding.text
    assert not [*hardware.check_hardware(config_of())]


class Broken(Tracker):
    """Its server goes away at step 1 and comes back at step 3."""

    remedy = "start its server"
    taken: list[object] = []  # noqa: RUF012

    def open(self, run: TrackedRun) -> None:
        if run.first:
            raise OSError("no route to host")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step in (1, 2):
            raise OSError("the server is away")
        self.taken.append(step)

    def close(self, status: str) -> None:
        self.taken.append(status)


@pytest.fixture
def broken(monkeypatch, tmp_path):
    config = config_of()
    monkeypatch.setitem(TRACKERS._scanned(), "broken", Broken)
    monkeypatch.setattr(Broken, "taken", [])
    config.measure.track = ["broken"]
    return config, make(tmp_path)


def test_tracker_that_fails_warns_once_and_costs_no_step(broken, caplog):
    config, path = broken
    with tracked(config, path, 0, 0) as tracking:
        for step in range(4):
            tracking.evaluation(step, {"loss": 1.0})
        tracking.status = trackers.DONE
    assert Broken.taken == [0, 3, "done"]
    [warning] = [one for one in caplog.records if "broken" in one.getMessage()]
    assert "OSError: the server is away" in warning.getMessage()


def test_tracker_of_an_attempt_that_fails_is_closed_so(broken):
    config, path = broken
    with pytest.raises(RuntimeError), tracked(config, path, 0, 0):
        raise RuntimeError
    assert Broken.taken == ["failed"]


def test_tracker_that_cannot_be_opened_is_an_error_with_the_remedy(broken):
    config, path = broken
    text = r"measure.track=broken: .*no route to host\); start its server, or leave it out"
    with pytest.raises(ConfigError, match=text), tracked(config, path, 4, 0):
        pass
