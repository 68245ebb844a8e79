"""Stores at which ranks meet: files in a folder of one machine, and one whose values are proved."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import os
import secrets
import threading
from pathlib import Path
from typing import Any

import torch

from hires.core.errors import CommError
from hires.core.ranks import meeting

_library: Any = torch._C._distributed_c10d


def signed(whole: Any, secret: str, where: str = "torch's address") -> Any:
    """Returns a store whose values carry proofs of a secret; an empty one: it stays as it is."""
    return _SignedStore(whole, secret, where) if secret else whole


class _SignedStore(_library.Store):  # type: ignore[misc]
    """Adds a proof of the ranks' secret to what it keeps; CommError: a value has another one."""

    def __init__(self, whole: Any, secret: str, where: str) -> None:
        super().__init__()
        self._whole, self._secret, self._where = whole, secret, where

    def set(self, key: str, value: str | bytes) -> None:
        """Keeps a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._whole.set(key, meeting.proof(self._secret, key, data) + data)

    def get(self, key: str) -> bytes:
        """Returns a value, as soon as it is there."""
        return self._verified(key, bytes(self._whole.get(key)))

    def _verified(self, key: str, text: bytes) -> bytes:
        own, data = text[: meeting.PROOF_BYTES], text[meeting.PROOF_BYTES :]
        if not hmac.compare_digest(own, meeting.proof(self._secret, key, data)):
            raise CommError(
                f"{key!r} in the store at {self._where} carries no proof of the ranks' secret: "
                f"another program has written there, or {meeting.VARIABLE} differs between ranks"
            )
        return data

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Keeps a value where the key has none, ``expected`` being empty; returns what it has."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        text = meeting.proof(self._secret, key, data) + data
        return self._verified(key, bytes(self._whole.compare_set(key, expected, text)))

    # The library calls these for what they are of this class alone.

    def wait(self, *args: Any) -> None:
        """Waits for keys."""
        self._whole.wait(*args)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._whole.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which carries no proof: torch counts in it whether ranks came."""
        return int(self._whole.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Removes a key."""
        return bool(self._whole.delete_key(key))

    deleteKey = delete_key  # noqa: N815, as a PrefixStore calls it

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Sets the longest wait."""
        self._whole.set_timeout(timeout)


class FolderStore:
    """What other threads of the ranks of one machine keep, as files in the folder of a meeting.

    torch's own store for one machine grows with every write, and waits where rank 0 has left. Each
    method raises OSError then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._mine = folder, f"{os.getpid()}-{secrets.token_hex(4)}.new"

    def set(self, key: str, value: str) -> None:
        """Keeps a value."""
        self._written(value).replace(self._path(key))

    def get(self, key: str) -> bytes:
        """Returns a value that is there."""
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        if not self._folder.is_dir():
            raise FileNotFoundError(self._folder)
        return all(self._path(key).exists() for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Keeps a value where the key has none, ``expected`` being empty; returns what it has."""
        written = self._written(value)
        with contextlib.suppress(FileExistsError):
            os.link(written, self._path(key))
        written.unlink()
        return self.get(key)

    def delete_key(self, key: str) -> None:
        """Removes a key."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()

    def _written(self, value: str) -> Path:
        path = self._folder / f"{threading.get_ident()}-{self._mine}"
        path.write_text(value, encoding="utf-8")
        return path
