"""Does the end of a run that hung show who was to blame?"""

from __future__ import annotations

from hires.cli.start_run import explain
from hires.core.store.rundir import RunDir
from hires.launcher.local.local_launcher import Outcome

PAGE = """no progress: rank 1 does not answer

unmatched: norm of bn3 in B0: rank 1 has not come to it

where every rank stands
  rank 1 does not answer

last communications of each rank
  rank 0: a barrier
"""


def test_first_lines_of_the_page_are_shown_and_where_the_rest_is(tmp_path, capsys):
    run = RunDir(tmp_path, 0)
    run.attempt_dir.mkdir()
    (run.attempt_dir / "hang.txt").write_text(PAGE)
    explain(Outcome("failed", "no progress: rank 1 does not answer", {}, [], 1, "hang"), run)
    err = capsys.readouterr().err
    assert err.count("no progress: rank 1 does not answer") == 1
    assert "  unmatched: norm of bn3 in B0: rank 1 has not come to it\n" in err
    assert "last communications" not in err
    assert f"the whole page: {run.attempt_dir / 'hang.txt'}\n" in err


def test_page_that_could_not_be_written_is_no_crash(tmp_path, capsys):
    run = RunDir(tmp_path, 0)
    explain(Outcome("failed", "no progress: no rank answers", {}, [], None, "hang"), run)
    assert "the whole page" not in capsys.readouterr().err
