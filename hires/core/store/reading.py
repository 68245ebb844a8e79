"""Reads JSON, YAML and JSON-lines files that may be missing, damaged, hostile or too large.

A file of a run folder may be half written, of a newer hires, or a pipe that never ends. Only
regular files of bounded size are read (``file_names.MAX_BYTES``). The argument ``notes`` decides
what happens to a file that cannot be used:

    notes=None       it raises a RunError that names the file, the reason and the remedy
    notes=[...]      it appends a Note and returns an empty value
    notes=Warned()   it returns an empty value, and the note is a warning of the log
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from unicodedata import category

import yaml

from hires.core.errors import ConfigError, RunError
from hires.core.store.file_names import MAX_BYTES, MIB, StrPath, line_files

log = logging.getLogger(__name__)

Values = dict[str, Any]

MAX_TEXT = 2000
"""Characters of one text that are kept; a command line with many overrides has a few hundred."""
MAX_DEPTH = 100
"""Levels of a YAML file."""
_DAMAGED = (ValueError, RecursionError, TypeError, yaml.YAMLError)
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Kinds of characters that move the cursor, turn the direction of writing or show nothing."""


@dataclass(frozen=True)
class Note:
    """A file or value that could not be used, and why."""

    where: str
    """Run folder or file, by the last parts of its path."""
    text: str


Notes = list[Note] | None


class Warned(list[Note]):
    """Notes that are said at once, for readers that go on without the file."""

    def append(self, note: Note) -> None:
        """Keeps a note, which is a warning of the log."""
        log.warning("%s: %s", note.where, note.text)
        super().append(note)


_SUSPECT = re.compile(r"[^\n\t -~]")
"""Whatever is no plain character of ASCII, a line break or a tab."""


def read_json(path: StrPath, notes: Notes = None, *, needed: bool = False) -> Values:
    """Returns the object in a JSON file; an empty one if it is missing or cannot be used.

    A missing file counts as one that cannot be used only if it is ``needed``.

    Raises:
        RunError: the file cannot be used and ``notes`` is None.
    """
    return _read(path, json.loads, notes, needed)


def read_yaml(path: StrPath, notes: Notes = None) -> Values:
    """Returns the keys of a YAML file, which is needed; else as :func:`read_json`."""
    return _read(path, _parse_yaml, notes, needed=True)


def read_lines(path: StrPath, notes: Notes = None) -> list[Values]:
    """Returns the objects of a JSON-lines file, none if it is missing.

    Lines that were only half written are counted in one note, or in a warning of the log.

    Raises:
        RunError: the file cannot be read and ``notes`` is None.
    """
    torn: list[int] = []
    lines = parse_lines(read_bytes(path, notes) or b"", torn)
    if torn:
        left_out = note(path, f"{len(torn)} torn line{'s' if len(torn) > 1 else ''} left out")
        (Warned() if notes is None else notes).append(left_out)
    return lines


def read_rank_lines(attempt: StrPath, name: str, notes: Notes = None) -> list[Values]:
    """Returns the lines of one kind of an attempt, those of each rank together, as `read_lines`."""
    files = line_files(attempt, name)
    return [line for path in files for line in read_lines(path, notes)]


def parse_lines(data: bytes, torn: list[int] | None = None) -> list[Values]:
    """Returns the objects of some JSON lines; numbers of torn lines, from 1, go to ``torn``."""
    lines = []
    for number, text_of_line in enumerate(data.split(b"\n"), start=1):
        if not text_of_line.strip():
            continue
        try:
            line = json.loads(text_of_line)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict):
            lines.append(line)
        elif torn is not None:
            torn.append(number)
    return lines


def read_bytes(path: StrPath, notes: Notes = None, *, needed: bool = False) -> bytes | None:
    """Returns what a regular file holds; None and errors as those of :func:`read_json`."""
    limit = _most_bytes(Path(path))
    try:
        with open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes <= limit:
                return file.read(limit)
        why = f"{num_bytes / MIB:.1f} MiB, more than the {limit // MIB} MiB that are read"
    except FileNotFoundError as error:
        if not needed:
            return None
        why = error.strerror or str(error)
    except (OSError, ValueError) as error:  # ValueError: a path that holds a null byte
        why = getattr(error, "strerror", None) or str(error)
    if notes is None:
        raise RunError(f"cannot read {path}: {why}; is {Path(path).parent} a run folder?")
    notes.append(note(path, why))
    return None


def size_of(path: StrPath) -> int | None:
    """Returns the bytes of a regular file; None if it is missing, -1 if it is no such file."""
    try:
        found = Path(path).stat()
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def open_regular(path: StrPath) -> BinaryIO:
    """Opens a regular file to read; raises OSError for a folder, a pipe or a device too."""
    # Without O_NONBLOCK, opening a pipe waits for its writer; fstat looks at what was opened.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    raise OSError(errno.EINVAL, "not a plain file, and left out")


def read_named(path: StrPath, most: int = MIB) -> str:
    """Returns the text of a file that a user names; raises OSError, or ValueError if it is none."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most // MIB} MiB")
    return data.decode()


def read_named_values(path: StrPath) -> Values:
    """Returns the keys of a file that a user names, which is JSON by its ending, else YAML.

    ConfigError: it cannot be read, is damaged, or holds no keys; the caller adds the remedy.
    """
    is_json = Path(path).suffix == ".json"
    parse = json.loads if is_json else functools.partial(_parse_yaml, takes_aliases=True)
    try:
        value = parse(read_named(path, _most_bytes(Path(path))).encode())
    except OSError as error:
        is_folder = Path(path).is_dir()
        why = "it is a folder, and no file in it" if is_folder else error.strerror or str(error)
        raise ConfigError(f"cannot read {path}: {why}") from None
    except _DAMAGED as error:
        raise ConfigError(f"{path} is damaged ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no keys with values")
    return value


def _most_bytes(path: Path) -> int:
    of_rank = path.name.partition(".")[2]
    names = (path.name, of_rank, path.suffix)
    return next((MAX_BYTES[name] for name in names if name in MAX_BYTES), MIB)


def text(value: Any, limit: int = MAX_TEXT) -> str | None:
    """Returns a text without invisible characters, shortened to ``limit``; None if it is none."""
    if not isinstance(value, str):
        return None
    kept = value[: limit + 1]
    if not kept.isprintable():
        kept = printable(re.sub(r"[\n\r\t]", " ", kept))
    return kept if len(value) <= limit else f"{kept[:limit]}... ({len(value)} characters)"


def printable(value: str) -> str:
    """Returns a text with its line breaks and tabs, and nothing else that a terminal would obey."""
    return _SUSPECT.sub(lambda match: _visible(match[0]), value)


def note(path: StrPath, why: str) -> Note:
    """Returns a note about a file, named by the last parts of its path."""
    where = "/".join(Path(path).parts[-3:])
    return Note(text(where, 200) or "?", text(why, 300) or "?")


def damaged(path: StrPath, why: str, notes: Notes) -> Values:
    """Returns the empty value of a damaged file, and notes why or raises a RunError."""
    if notes is None:
        raise RunError(f"{path} is damaged ({why}); run the experiment anew with --again")
    notes.append(note(path, f"damaged: {why}"))
    return {}


def _read(path: StrPath, parse: Callable[[bytes], Any], notes: Notes, needed: bool) -> Values:
    data = read_bytes(path, notes, needed=needed)
    if data is None:
        return {}
    try:
        value = parse(data)
    except _DAMAGED as error:
        return damaged(path, str(error), notes)
    if notes is None and parse is _parse_yaml and not isinstance(value, dict):
        raise ConfigError(f"{path} was edited, or is of another hires: it must hold keys")
    if not isinstance(value, dict):
        return damaged(path, "it holds no keys", notes)
    if parse is _parse_yaml and not data.endswith(b"\n"):  # half of a YAML file is often one, too
        return damaged(path, "it ends within a line", notes)
    return value


def yaml_text(values: Values) -> str:
    """Returns plain values as YAML."""
    # Only ASCII: PyYAML writes some other characters (U+0085) so that they read back changed.
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=False)


def _parse_yaml(data: bytes, takes_aliases: bool = False) -> Any:
    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    # libyaml builds nested values by recursion in C: 50,000 brackets would end this process.
    for event in yaml.parse(data, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) and not takes_aliases:  # few are a billion values
            raise ValueError("it has aliases; write out what they stand for")
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    return yaml.load(data, Loader=loader)


def _visible(sign: str) -> str:
    return "\N{REPLACEMENT CHARACTER}" if category(sign) in _INVISIBLE else sign
