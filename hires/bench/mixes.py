"""Reads mixes of operations that `hires bench comm --replay` plays: files, and logs of runs.

A mix is one step of an application as the ranks call it, in YAML or JSON:

    about: a line of text
    source: where the sizes come from
    calls:
      - {operation: all_to_all_single, bytes: 4MiB, dtype: float16, count: 4}
      - {operation: all_reduce, bytes: 3328KiB, divided: true, async: true}
      - {operation: send, bytes: 64KiB, ranks: [0, 1]}

``bytes`` is what a rank gives, ``divided`` by the number of ranks if it is the sum of all.
``async`` calls are waited for at the end of the step, or when ``MOST_OPEN`` are under way.
``ranks`` are the members of a group (of ``send``: the sender and the receiver); without it all
ranks take part. All ranks walk the calls in this order, so blocking calls cannot wait for each
other in a circle.

A run folder with ``comm.log=full`` is a mix too: the calls of its last whole log, each collective
once, in the order of their begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hires.bench.message_operations import BARRIER, BENCHED, MESSAGES
from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.store import file_names, message_entries, reading, records
from hires.core.store.message_entries import LoggedCall, RankMessages
from hires.core.units import parse_size

FOLDER = Path(__file__).parent
SHIPPED = {path.stem.removeprefix("mix_"): path for path in sorted(FOLDER.glob("mix_*.yaml"))}
"""Name -> file of the mixes that come with hires."""
SEND = "send"
PLAYED = (SEND, *(name for name in BENCHED if name not in MESSAGES))
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
KEYS = ("operation", "bytes", "dtype", "count", "divided", "async", "ranks")
MOST_CALLS = 100_000
MOST_OPEN = 16
"""Calls that are under way at once."""
_LOGGED = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}
"""Operation in a log -> the one that plays it."""


class MixCall(NamedTuple):
    """One call of a mix."""

    operation: str
    num_bytes: int
    dtype: str = "float32"
    is_async: bool = False
    ranks: tuple[int, ...] = ()
    """Empty: all."""


_EXAMPLE = "`calls: [{operation: all_reduce, bytes: 1MiB, count: 4}]`"


class Mix(NamedTuple):
    """A step of an application."""

    name: str
    about: str
    calls: tuple[MixCall, ...]


def read_mix(name: str, num_ranks: int) -> Mix:
    """Returns the mix of a shipped name, a file, or a run folder, for a number of ranks.

    ConfigError: it is none of them, or a call in it cannot be meant: its number, why, and a remedy.
    """
    if name in SHIPPED:
        return _of_values(name, reading.read_yaml(SHIPPED[name]), num_ranks)
    path = Path(name)
    if path.is_dir():
        return _of_run(path, num_ranks)
    if not path.is_file():
        raise ConfigError(f"--replay {name} is no file, run folder or mix; {offer(name, SHIPPED)}")
    return _of_values(path.stem, reading.read_named_values(path), num_ranks)


def _of_values(name: str, values: Mapping[str, Any], num_ranks: int) -> Mix:
    listed = values.get("calls")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"mix {name} has no list of calls; write {_EXAMPLE}")
    calls: list[MixCall] = []
    for number, one in enumerate(listed, start=1):
        try:
            calls += _parsed(one, num_ranks)
        except ConfigError as error:
            raise ConfigError(f"mix {name}, call {number}: {error}") from None
        if len(calls) > MOST_CALLS:
            raise ConfigError(f"mix {name} has more than {MOST_CALLS} calls; write fewer")
    return Mix(name, str(values.get("about", "")), tuple(calls))


def _parsed(one: Any, num_ranks: int) -> list[MixCall]:
    if not isinstance(one, Mapping):
        raise ConfigError(f"{one!r:.60} is no call; write {{operation: all_reduce, bytes: 1MiB}}")
    for key in one:
        if key not in KEYS:
            raise ConfigError(f"unknown key {key!r}; {offer(str(key), KEYS)}")
    operation, dtype = str(one.get("operation")), str(one.get("dtype", "float32"))
    for word, names in ((operation, PLAYED), (dtype, DTYPES)):
        if word not in names:
            raise ConfigError(f"unknown word {word!r}; {offer(word, names)}")
    num_bytes = 0 if operation == BARRIER else parse_size(one.get("bytes"))
    if num_bytes is None:
        raise ConfigError(f"bytes {one.get('bytes')!r} is no size; write 64KiB or 4096")
    count, ranks = one.get("count", 1), tuple(one.get("ranks", ()))
    if not isinstance(count, int) or not 0 < count <= MOST_CALLS:
        raise ConfigError(f"count {count!r} must be a whole number from 1 to {MOST_CALLS}")
    _check_ranks(operation, ranks, num_ranks)
    if one.get("divided"):
        num_bytes //= num_ranks
    return [MixCall(operation, num_bytes, dtype, bool(one.get("async")), ranks)] * count


def _check_ranks(operation: str, ranks: tuple[Any, ...], num_ranks: int) -> None:
    if any(not isinstance(rank, int) or not 0 <= rank < num_ranks for rank in ranks):
        needed = max((rank for rank in ranks if isinstance(rank, int)), default=0) + 1
        raise ConfigError(f"ranks {[*ranks]} are not 0 to {num_ranks - 1}; use --ranks {needed}")
    if len({*ranks}) < len(ranks) or len(ranks) == 1 or (operation == SEND) != (len(ranks) == 2):
        if operation != SEND and len(ranks) == 2 and len({*ranks}) == 2:
            return
        wanted = "two, the sender first" if operation == SEND else "different, two or more"
        raise ConfigError(f"ranks {[*ranks]} of {operation} must be {wanted}")


def _of_run(folder: Path, num_ranks: int) -> Mix:
    """Returns what a run's ranks have logged; ConfigError: it kept no single messages."""
    record = records.read_record(folder)
    attempt = file_names.attempt_dir(folder, record["attempt"] if record else 0)
    calls = calls_of(message_entries.read(attempt))
    if not calls:
        raise ConfigError(f"--replay {folder} holds no messages; run it with comm.log=full")
    for call in calls:
        _check_ranks(call.operation, call.ranks, num_ranks)
    return Mix(folder.name, f"messages of {folder.name}", tuple(calls[:MOST_CALLS]))


def calls_of(logs: Iterable[RankMessages]) -> list[MixCall]:
    """Returns the calls that ranks have logged, each once, in the order of their begin."""
    timed: list[tuple[float, MixCall]] = []
    for log in logs:
        for message in log.messages:
            call = _call_of(message)
            if call is not None:
                timed.append((message.issued_s, call))
    return [call for _, call in sorted(timed, key=lambda one: one[0])]


def _call_of(message: LoggedCall) -> MixCall | None:
    # A message is played once, by what its sender logged, a collective by its first member.
    operation = _LOGGED.get(message.operation, message.operation)
    is_async = message.posted_s > message.issued_s
    if operation == SEND and len(message.ranks) == 1:
        ranks = (message.rank, message.ranks[0])
        return MixCall(SEND, message.num_bytes, "uint8", is_async, ranks)
    if operation not in PLAYED or operation == SEND or len(message.ranks) < 2:
        return None
    if message.rank != min(message.ranks):
        return None
    dtype = "float32" if message.num_bytes % 4 == 0 else "uint8"
    return MixCall(operation, message.num_bytes, dtype, is_async, tuple(sorted(message.ranks)))
