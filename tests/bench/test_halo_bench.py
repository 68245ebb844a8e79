"""Are the exchanges of a network those of its plan, and every pixel of a strip checked?"""

from __future__ import annotations

import json
import logging

import pytest

from hires.bench import halo_bench
from hires.bench.halo_bench import BENCHMARK, HaloBuffers, HaloOptions, exchanges_of
from hires.bench.message_race import RaceWorld
from hires.core.errors import ConfigError

MAP = {
    "shape": [1, 8, 12, 10],
    "tiles": [1, 2],
    "messages": [[1, 0, 0, 12, 5, 6], [0, 1, 0, 12, 3, 5]],
}


def sides():
    return [HaloBuffers(MAP, RaceWorld(rank, 2, lambda: None, lambda t: None)) for rank in (0, 1)]


class Post:
    """A library whose messages arrive when the sender has sent."""

    def __init__(self):
        self.box = {}

    def of(self, rank):
        outer = self

        class Library:
            def isend(self, tensor, peer, tag):
                outer.box[rank, peer, tag] = tensor.clone()
                return self

            def irecv(self, tensor, peer, tag):
                outer.wanted = tensor, (peer, rank, tag)
                return self

            def wait(self):
                tensor, key = outer.wanted
                if key in outer.box:
                    tensor.copy_(outer.box[key])

        return Library()


def test_strips_arrive_as_the_plan_has_them_and_a_wrong_pixel_is_found():
    halves, post = sides(), Post()
    for half in halves:
        half.fill()
        assert half.num_wrong() > 0
    for rank in (0, 1, 0):  # the first one's neighbour has sent when it exchanges again
        halves[rank].exchange(post.of(rank))
    assert [half.num_wrong() for half in halves] == [0, 0]
    tag = 0
    post.box[1, 0, tag][0, 3, 0, 2] += 1
    halves[0].fill()
    halves[0].exchange(post.of(0))
    assert halves[0].num_wrong() == 1


def test_plain_copies_write_the_strips():
    for half in sides():
        half.fill()
        half.copy()
        assert half.num_wrong() == 0


def test_exchanges_are_those_of_the_plan():
    found = exchanges_of("resnet18", 64, (1, 2), 1)
    assert sum(one["layers"] for one in found) > 10
    largest = found[0]
    assert largest["bytes"] == max(one["bytes"] for one in found)
    assert {one["model"] for one in found} == {"resnet18"}
    for one in found:
        n, channels, height, width = one["shape"]
        for source, target, r0, r1, c0, c1 in one["messages"]:
            assert {source, target} == {0, 1}
            assert 0 <= r0 < r1 <= height
            assert 0 <= c0 < c1 <= width
        assert n * channels > 0


def test_network_that_is_unknown_names_the_option_of_halos():
    with pytest.raises(ConfigError, match="--models vgg is unknown"):
        exchanges_of("vgg", 64, (1, 2), 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tiles", "2"], "--tiles 2 is no grid"),
        (["--tiles", "1x1"], "--tiles 1x1 is no grid of two tiles"),
        (["--images", "12,x"], "--images 12,x must be numbers of pixels"),
        (["--ways", "raw:c"], "--ways raw:c exchanges no halos"),
    ],
)
def test_option_that_makes_no_sense_is_refused(words, message, capsys):
    assert BENCHMARK.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.dist
def test_small_network_is_measured(capsys):
    words = ["--models", "resnet18", "--images", "64", "--ways", "gloo", "--start", "torchrun"]
    assert BENCHMARK.main([*words, "--rounds", "1", "--seconds", "1e-6", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["ways"][way]["wrong"] == 0 for row in rows for way in ("gloo", "copies"))


def test_routes_have_a_default():
    entered = HaloOptions(start="torchrun").entered
    assert entered[-1] == "copies"
    assert "gloo" in entered
    with pytest.raises(ConfigError):
        _ = HaloOptions(ways=("table",)).entered


def test_progress_counts_the_exchanges_that_are_left(monkeypatch, caplog):
    found = [{**one, "ways": {}} for one in exchanges_of("resnet18", 64, (1, 2), 1)]
    monkeypatch.setattr(halo_bench, "stream_started_ranks", lambda *_, **__: iter(found))
    options = HaloOptions(models=("resnet18",), images=(64,), start="torchrun", ways=("gloo",))
    with caplog.at_level(logging.INFO, "hires.bench.halo_bench"):
        measured = halo_bench.measure(options, None)
        next(measured)
        assert "exchanges" not in caplog.text  # what is shown has been kept before
        next(measured)
    assert f"resnet18 64: 1 of {len(found)} exchanges" in caplog.text
