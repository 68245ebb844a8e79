"""Is the memory of ranks drawn as it is? Expected drawings are written out."""

from __future__ import annotations

from hires.cli.screens.show_plan import bar, memory_lines, start_reason
from hires.core.units import MIB
from hires.plan.memory import RankMemory

SMALL = RankMemory(MIB, MIB, MIB, 4 * MIB, MIB).to_dict()
LARGE = RankMemory(2 * MIB, 0, 2 * MIB, 11 * MIB, MIB).to_dict()


def test_bar_shows_parts_and_what_is_free():
    assert bar(SMALL, 16 * MIB) == "[PPGOAAAAAABB............]"
    assert bar(LARGE, 16 * MIB) == "[PPPOOOAAAAAAAAAAAAAAAABB]"


def test_bar_beyond_the_limit_ends_with_an_arrow():
    text = bar(LARGE, 8 * MIB)
    assert len(text) == 26
    assert text.endswith("A>]")


def test_equal_neighbours_share_a_line_and_the_largest_is_a_full_bar():
    head, first, second, names, scale = memory_lines([LARGE, LARGE, SMALL])
    assert head.split() == ["rank", "peak", *"PGOAB"]
    assert names == "P parameters, G gradients, O optimiser, A activations, B buffers"
    assert max(map(len, (head, first, second, names))) <= 80
    assert first.split()[0] == "0-1"
    assert first.split()[-6:] == ["16.0", "2.0", "0.0", "2.0", "11.0", "1.0"]
    assert second.split()[0] == "2"
    assert scale == "MiB, predicted; a full bar is 16.0 MiB"


def test_limit_is_a_full_bar():
    lines = memory_lines([SMALL], limit=32 * MIB)
    assert lines[-1] == "MiB, predicted; a full bar is memory.limit, 32.0 MiB"
    assert lines[1].count(".....") == 3


def test_nothing_known_is_nothing_drawn():
    assert memory_lines([]) == []


def test_a_start_that_needs_most_says_for_what():
    more = RankMemory(MIB, MIB, MIB, 4 * MIB, MIB, start_bytes=32 * MIB).to_dict()
    own, made = {"recipe": None}, {"recipe": {"make": "folded_weight"}}
    packed = {"recipe": {"make": "unpacked_weight"}}
    reasons = {
        "weights are brought into the order of their kernels there": {"a": own},
        "weights are unpacked there from 4 bits": {"a": own, "b": packed},
        "weights are computed from others there": {"a": own, "b": packed, "c": made},
    }
    for why, params in reasons.items():
        lines = memory_lines([more], why=start_reason(params))
        assert lines[-1] == f"the start needs up to 32.0 MiB: {why}"
