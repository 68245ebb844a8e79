"""Defines the errors that a user sees, each with its exit code; all others are bugs of hires."""

from collections.abc import Sequence

PREEMPTED = 75
"""Exit code of ranks and launchers that were preempted (SIGUSR2), once the state is saved:
start the same run again and it goes on. It is EX_TEMPFAIL of sysexits.h: try again later."""

REGRESSION = 4
"""Exit code of a comparison in which something became worse."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, SIGTERM or `hires cancel`, as shells have it."""


class HiresError(Exception):
    """An error that is explained in one paragraph, without a traceback."""

    exit_code = 1


def error_object(kind: str, text: str, exit_code: int) -> dict[str, object]:
    """Returns what ``--json`` prints in the place of a result."""
    return {"error": {"type": kind, "text": text, "exit_code": exit_code}}


class RunError(HiresError):
    """A run that had started failed: a rank died, a file was broken, a disk was full."""


class StoppedError(RunError):
    """A run that a command needs was cancelled: with Ctrl-C, SIGTERM or `hires cancel`."""

    exit_code = INTERRUPTED


class EditedError(RunError):
    """Something that a run was planned from was edited before its ranks started."""

    exit_code = 2


class LateError(RunError):
    """Something that had begun was not done in time."""


class LossError(RunError):
    """The loss is no number any more."""


class ParityError(RunError):
    """A layout does not compute what one process computes."""


class CommError(RunError):
    """Ranks could not talk to each other, or not within ``comm.timeout_s``."""


class PeerError(CommError):
    """Another rank is late, has ended, or calls something else; the fault is not of this rank."""


class EndedError(PeerError):
    """The processes of other ranks, of ``ranks`` where these are known, have ended."""

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class ConfigError(HiresError):
    """The configuration cannot be used; raised before any rank starts."""

    exit_code = 2


class PlanError(HiresError):
    """The layout cannot run as asked; raised before any rank starts."""

    exit_code = 3
