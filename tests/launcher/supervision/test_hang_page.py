"""Does the page say what is known, however little that is?"""

from __future__ import annotations

from pathlib import Path

from hires.core.ranks.heartbeat import RankStatus, stacks_file
from hires.launcher.supervision.watchdog import Hang
from hires.plan.event import Event
from hires.plan.proof.stalled import Stall, Wait

STACKS = """Thread 0x01 (most recent call first):
  File "/x/hires/core/ranks/heartbeat.py", line 9 in _run

Current thread 0x02 (most recent call first):
  File "/x/mine.py", line 7 in doze
  File "/x/other.py", line 8 in step
"""


def test_without_a_plan_the_ranks_own_words_are_told(tmp_path: Path):
    told = {0: RankStatus(0, 3, "F1", "a receive from rank 1", 1, 5, since_s=9.0, last=["a send"])}
    found = Hang(tmp_path, told, {}, 2, ages_s={0: 1.0, 1: 70.0})
    assert found.cause == (
        "no progress: rank 1 does not answer: no reason is known (last heartbeat 70 s ago)"
    )
    text = found.page()
    assert "rank 0 is in F1 of step 3 and waits in a receive from rank 1, 9.0 s" in text
    assert "  rank 0: a send\n" in text
    assert "no stack: it did not answer" in text


def test_stack_of_the_main_thread_is_shown(tmp_path: Path):
    stacks_file(tmp_path, 0).parent.mkdir()
    stacks_file(tmp_path, 0).write_text(STACKS)
    text = Hang(tmp_path, {0: RankStatus(0, 2, "B0", since_s=9.0)}, {}, 1).page()
    assert 'File "/x/mine.py", line 7 in doze' in text
    assert "pulse.py" not in text


def test_circle_is_told_as_one(tmp_path: Path):
    posts = [Event("recv", peer, 0, (2,), "float32") for peer in (1, 0)]
    waits = [Wait(0, "x", [1], 9.0, posts[0]), Wait(1, "y", [0], 8.0, posts[1])]
    found = Hang(tmp_path, {}, {}, 2, stall=Stall(waits, circle=[0, 1]))
    assert found.cause == (
        "no progress: ranks wait for each other in a circle; rank 0 waits for x from rank 1, "
        "since 9.0 s"
    )


def test_many_ranks_still_make_one_page(tmp_path: Path):
    told = {rank: RankStatus(rank, 1, "", "a barrier of all ranks") for rank in range(511)}
    waits = [Wait(rank, "a barrier of all ranks", [511], 9.0) for rank in range(511)]
    found = Hang(tmp_path, told, {}, 512, stall=Stall(waits, [511]))
    text = found.page()
    assert "and 505 more ranks wait" in text
    assert text.count("no stack") == 16
    assert "rank 511 does not answer" in text
    assert len(text.splitlines()) < 120


def test_nobody_answers(tmp_path: Path):
    assert "rank 0 does not answer: no sign of life" in Hang(tmp_path, {}, {}, 1).cause
    assert Hang(tmp_path, {}, {}, 0).cause == "no progress: no rank answers"
