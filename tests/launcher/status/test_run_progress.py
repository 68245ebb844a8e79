import json

from hypothesis import given
from hypothesis import strategies as st

from hires.launcher.status.run_progress import FinishedStep, MetricsTail, RunProgress


def step(rank, number, step_s, loss=None):
    return {"kind": "step", "rank": rank, "step": number, "step_s": step_s, "loss": loss}


def test_step_is_over_when_every_rank_reported_it():
    progress = RunProgress(world=2, batch=6, steps=3)
    assert progress.feed({"kind": "ready", "rank": 0}) is None
    assert progress.feed(step(0, 0, 0.5)) is None
    assert progress.feed(step(0, 1, 0.5)) is None
    assert progress.feed(step(1, 0, 1.5, 2.0)) == FinishedStep(0, 1.5, 4.0, 2.0)
    assert progress.feed(step(1, 1, 0.25)) == FinishedStep(1, 0.5, 12.0, None)


def test_plain_line():
    progress = RunProgress(world=1, batch=6, steps=12)
    assert (
        progress.text(FinishedStep(2, 0.5, 12.0, 2.30123))
        == "step 3/12  500.0 ms  12 img/s  loss 2.301"
    )
    assert progress.text(FinishedStep(2, 0.5, 12.0, None)) == "step 3/12  500.0 ms  12 img/s"
    assert progress.text(FinishedStep(2, 0.5, 12.0, float("nan"))).endswith("loss nan")
    skipped = progress.feed({**step(0, 0, 1.0, 2.0), "skipped": True})
    assert progress.text(skipped).endswith("loss 2, skipped: gradients overflow")


def test_loss_of_a_step_is_the_mean_over_replicas():
    progress = RunProgress(world=2, batch=6, steps=3)
    progress.feed(step(0, 0, 1.0, 1.0))
    over = progress.feed(step(1, 0, 1.0, 2.0))
    assert over is not None
    assert over.loss == 1.5


@given(st.lists(st.text(), max_size=6), st.lists(st.integers(0, 60), max_size=8))
def test_tail_gives_every_line_once_however_the_file_grows(tmp_path_factory, texts, cuts):
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    seen = []
    for cut in [*sorted(cuts), len(data)]:
        path.write_bytes(data[:cut])
        seen += tail.read()
    assert seen == [{"text": text} for text in texts]
    assert tail.seen is bool(texts)
