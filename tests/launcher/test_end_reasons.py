import re
from pathlib import Path

import pytest

from hires.launcher.end_reasons import END_REASONS, JOB_ENDS, restarts
from hires.launcher.interface import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"


def test_page_lists_every_reason_with_its_evidence():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {word: text for word, text in rows if word in END_REASONS}
    assert listed == {word: reason.evidence for word, reason in END_REASONS.items()}


def test_jobs_that_schedulers_start_again():
    assert [word for word in END_REASONS if restarts(word)] == ["preempted", "timeout", "node"]
    assert not restarts(None)
    assert not restarts("a word of a later hires")


@pytest.mark.parametrize(
    ("word", "state", "reason"),
    [
        ("CANCELLED", "cancelled", None),
        ("FAILED", "failed", None),
        ("DEADLINE", "failed", "timeout"),
        ("BOOT_FAIL", "failed", "node"),
        ("OUT_OF_MEMORY", "failed", "oom"),
    ],
)
def test_state_of_an_ended_job_gives_state_and_reason(word, state, reason):
    assert JOB_ENDS[word] == (state, reason)


@pytest.mark.parametrize(
    ("state", "reason", "code"),
    [
        ("done", None, 0),
        ("failed", None, 1),
        ("failed", "node", 1),
        ("failed", "preempted", 75),
        ("failed", "timeout", 75),
        ("lost", None, 1),
        ("cancelled", None, 130),
    ],
)
def test_exit_code_follows_state_and_reason(state, reason, code):
    assert Outcome(state, None, {}, [], None, reason).exit_code == code
