"""Does the check of NCCL take the way of a run's messages, and does it see what goes wrong?"""

from __future__ import annotations

import pytest
import torch

from hires.bench import nccl_posts
from hires.bench.echo_backend import Copies, EchoBackend
from hires.comm.backends.group_calls import Channels
from hires.comm.backends.known_backends import BACKENDS, REACHES
from hires.comm.transport import transport
from hires.core.errors import CommError, RunError
from hires.parallel.cursor import WAITS, Cursor
from hires.plan.channels import Channel, channels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(BACKENDS, "_items", dict(BACKENDS._items))
    for name in [*REACHES, "copies", "echo"]:
        monkeypatch.setitem(REACHES, name, REACHES.get(name, ()))
    for name, value in vars(transport).items():
        monkeypatch.setattr(transport, name, value)


def joined(rank: int, library: Copies) -> EchoBackend:
    """Returns the backend of a world of one."""
    backend = EchoBackend(rank, library)
    backend.join("file://nowhere", 1.0, 1, 0)
    return backend


@pytest.mark.slow
def test_steps_and_messages_arrive():
    found = nccl_posts._rank(0, "cpu")
    assert found["wrong"] == []
    plans = [plan for _, plan in map(nccl_posts._planned, nccl_posts.OVERLAPS)]
    assert {plan.halo_overlap for plan in plans} == {"off", "on"}
    assert {plan.num_directions for plan in plans} == {2}
    assert found["channels"] > 2 * len(channels(plans[0])), "those of the pipeline count, too"
    assert found["messages"] > 100


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(300)
def test_check_ends_well_in_a_process_of_its_own():
    is_right, words = nccl_posts.nccl_posts("simulated")
    assert is_right, words
    assert words.startswith("a stand-in: ")


def test_read_before_the_wait_is_seen(monkeypatch):
    def wait(self, event):
        _, post, tensor = self._open[WAITS[event.kind], event.peer, event.tag].popleft()
        return post, tensor

    monkeypatch.setattr(Cursor, "wait", wait)
    first, second = nccl_posts._rank(0, "cpu")["wrong"]
    assert "tensors differ with overlap=off" in first
    assert "tensors differ with overlap=on" in second


def test_sum_read_before_its_wait_is_seen(monkeypatch):
    monkeypatch.setattr("hires.parallel.gradients.GradientSync.finish", lambda self, event: None)
    monkeypatch.setattr("hires.plan.gradient_sums.ALONE_BYTES", 64)  # early sums in a small network
    assert "tensors differ" in nccl_posts._rank(0, "cpu")["wrong"][0]


def test_message_of_a_rank_to_itself_has_both_sides():
    class Short(Copies):
        def batch_isend_irecv(self, posts):
            assert len(posts) == 4
            return super().batch_isend_irecv(posts)

    Channels(joined(1, Short()), [Channel("messages", ((1, 1), (1, 1)))], CPU)


def test_message_that_fills_no_receive_is_refused():
    echo = joined(0, Copies())
    send = echo.P2POp(echo.isend, torch.ones(2), 1, None)
    receive = echo.P2POp(echo.irecv, torch.ones(3), 1, None)
    with pytest.raises(AssertionError, match="its own receives"):
        echo.batch_isend_irecv([send, receive])


def test_ranks_that_wait_for_each_other_are_named(monkeypatch):
    config = nccl_posts._config({"parallel": nccl_posts.PIPELINE})
    plan = nccl_posts._plan(config)
    transport.backends = {"nccl": joined(1, Copies())}
    monkeypatch.setattr(nccl_posts._Mail, "post", lambda *args: nccl_posts._Side(torch.ones(1), 1))
    with pytest.raises(RunError, match="wait for each other"):
        nccl_posts.run_pipeline(plan, CPU)


def test_every_step_ends_with_the_operations_that_streams_wait_for(monkeypatch):
    """Else the next synchronisation of a rank whose neighbour hangs would never return."""

    def hang():
        raise CommError("a sum has not ended")

    monkeypatch.setattr("hires.parallel.executor.finish_streams", hang)
    with pytest.raises(CommError, match="a sum has not ended"):
        nccl_posts._rank(0, "cpu")
