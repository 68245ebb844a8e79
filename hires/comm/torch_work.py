"""Stands for an operation of hires in ``torch.distributed``: a ``Work`` with a future."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.futures import Future, collect_all

from hires.core.errors import CommError

_NO_LIMIT = datetime.timedelta(0)


class HiresWork(dist.Work):
    """Operations that are under way as one.

    ``handles`` are those of :mod:`hires.comm` or of this class, ``results`` the tensors that they
    fill, and ``then`` runs once when all are complete.
    """

    def __init__(
        self,
        handles: Sequence[Any] = (),
        results: Sequence[Any] = (),
        then: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._handles, self._results, self._then = [*handles], [*results], then
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None

    def wait(self, timeout: datetime.timedelta | None = _NO_LIMIT) -> bool:
        """Returns True when it is complete; ``timeout`` 0 or None: within that of the group.

        Raises:
            DistBackendError: it failed, or is late.
        """
        limit = timeout if timeout and timeout > _NO_LIMIT else None
        try:
            for handle in self._handles:
                if limit is None:
                    handle.wait()
                else:
                    handle.wait(limit)
        except CommError as error:
            raise dist.DistBackendError(str(error)) from error
        self._finish()
        return True

    def synchronize(self) -> None:
        """Waits."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it ended, well or not."""
        return all(handle.is_completed() for handle in self._handles)

    def is_success(self) -> bool:
        """Whether it ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Returns why it failed; None: it has not, or is under way."""
        errors = (handle.exception() for handle in self._handles)
        return next((error for error in errors if error is not None), None)

    def result(self) -> list[Any]:
        """Returns the tensors that it fills."""
        return self._results

    def get_future(self) -> Future[Any]:
        """Returns the future of the tensors that it fills.

        Its callbacks run in a thread of their own, so that they may wait for other operations, as
        PowerSGD's do.
        """
        if self._future is None:
            self._future = collect_all([one.get_future() for one in self._handles]).then(self._end)
        return self._future

    def _end(self, handles: Future[list[Future[Any]]]) -> list[Any]:
        for one in handles.value():
            one.value()  # raises what has failed
        self._finish()
        return self._results

    def _finish(self) -> None:
        if self._then is not None:
            with self._lock:  # a second thread waits until the first has finished
                then, self._then = self._then, None
                if then is not None:
                    then()
