"""Are recorded mixes read from files, from names and from logs, and wrong ones refused in words?"""

from __future__ import annotations

import pytest

from hires.bench.mixes import SHIPPED, MixCall, calls_of, read_mix
from hires.core.errors import ConfigError
from hires.core.store.message_entries import LoggedCall, RankMessages


def written(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_shipped_mixes_are_dominated_by_what_their_applications_are():
    assert {*SHIPPED} == {"dlrm", "moe"}
    moe, dlrm = read_mix("moe", 2), read_mix("dlrm", 2)
    in_all_to_all = sum(c.num_bytes for c in moe.calls if "all_to_all" in c.operation)
    assert in_all_to_all == 24 << 20
    assert {"all_to_all_single", "all_reduce", "broadcast"} == {c.operation for c in dlrm.calls}
    # 2048 images, 26 tables of width 16, fp32, shared by the ranks.
    sizes = {c.num_bytes for c in dlrm.calls if "all_to_all" in c.operation}
    assert sizes == {2048 * 26 * 16 * 4 // 2}


def test_file_has_all_keys(tmp_path):
    path = written(
        tmp_path,
        """
about: two ranks
calls:
  - {operation: all_reduce, bytes: 1KiB, dtype: bfloat16, count: 2, async: true}
  - {operation: all_to_all_single, bytes: 1MiB, divided: true}
  - {operation: send, bytes: 8, ranks: [1, 0]}
  - {operation: broadcast, bytes: 8, ranks: [0, 3]}
  - {operation: barrier}
""",
    )
    mix = read_mix(path, 4)
    assert (mix.name, mix.about) == ("mine", "two ranks")
    assert mix.calls == (
        *[MixCall("all_reduce", 1024, "bfloat16", True)] * 2,
        MixCall("all_to_all_single", 262144),
        MixCall("send", 8, ranks=(1, 0)),
        MixCall("broadcast", 8, ranks=(0, 3)),
        MixCall("barrier", 0),
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("{operation: allreduce, bytes: 8}", r"call 1: unknown word 'allreduce'; .*all_reduce"),
        ("{operation: all_reduce, bytes: much}", "bytes 'much' is no size; write 64KiB"),
        ("{operation: all_reduce, bytes: 8, of: 2}", "unknown key 'of'"),
        ("{operation: all_reduce, bytes: 8, count: 0}", "count 0 must be a whole number from 1"),
        ("{operation: all_reduce, bytes: 8, dtype: float8}", "unknown word 'float8'"),
        ("{operation: send, bytes: 8}", r"ranks \[\] of send must be two, the sender first"),
        ("{operation: send, bytes: 8, ranks: [1, 1]}", "must be two, the sender first"),
        ("{operation: reduce, bytes: 8, ranks: [1]}", "must be different, two or more"),
        ("{operation: send, bytes: 8, ranks: [0, 5]}", "are not 0 to 1; use --ranks 6"),
        ("all_reduce", "is no call; write {operation: all_reduce"),
    ],
)
def test_call_that_cannot_be_meant_is_refused(tmp_path, call, message):
    with pytest.raises(ConfigError, match=message):
        read_mix(written(tmp_path, f"calls:\n  - {call}\n"), 2)


def test_unknown_name_is_refused_with_the_shipped_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"--replay nothing is no file.*dlrm, moe"):
        read_mix("nothing", 2)
    with pytest.raises(
        ConfigError, match=r"has no list of calls; write `calls: \[{operation: all_reduce"
    ):
        read_mix(written(tmp_path, "about: nothing\n"), 2)


def logged(rank, operation, ranks, issued, num_bytes=64, posted=None):
    posted = issued if posted is None else posted
    names = (rank, operation, "halo", "F0", ranks, num_bytes, "gloo", "message")
    return LoggedCall(*names, issued, posted, posted, posted + 1.0)


def test_log_is_played_in_the_order_of_begin_each_call_once():
    logs = [
        RankMessages(0, "clock", 0, [
            logged(0, "all_reduce", [0, 1], 3.0),
            logged(0, "send", [1], 1.0, posted=1.5),
            logged(0, "recv", [1], 1.1),
        ]),
        RankMessages(1, "clock", 0, [
            logged(1, "all_reduce", [0, 1], 2.9),
            logged(1, "recv", [0], 1.2),
            logged(1, "send", [0], 2.0, num_bytes=7),
            logged(1, "all_gather", [1], 2.5),
        ]),
    ]  # fmt: skip
    assert calls_of(logs) == [
        MixCall("send", 64, "uint8", True, (0, 1)),
        MixCall("send", 7, "uint8", False, (1, 0)),
        MixCall("all_reduce", 64, "float32", False, (0, 1)),
    ]
