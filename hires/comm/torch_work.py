"""Stands for an operation of hires in ``torch.distributed``: a ``Work`` with a future."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from hires.comm.backends.fifo import run_in_thread
from hires.core.errors import CommError

_NO_LIMIT = datetime.timedelta(0)


class HiresWork(dist.Work):
    """Operations that are under way as one.

    ``handles`` are those of :mod:`hires.comm` or of this class, ``results`` the tensors that they
    fill, perhaps in lists; ``then`` runs once when all are complete.
    """

    def __init__(
        self,
        handles: Sequence[Any] = (),
        results: Sequence[Any] = (),
        then: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._handles, self._results, self._then = [*handles], [*results], then
        self._future: Future[Any] | None = None
        self._ended: threading.Event | None = None  # once a thread waits for its future
        self._error: Exception | None = None  # of that thread

    def wait(self, timeout: datetime.timedelta | None = _NO_LIMIT) -> bool:
        """Returns True when it is complete; ``timeout`` 0 or None: within that of the group.

        Raises:
            DistBackendError: it failed, or is late.
        """
        limit = timeout if timeout and timeout > _NO_LIMIT else None
        if self._ended is not None:
            limit_s = limit.total_seconds() if limit else None
            if not self._ended.wait(limit_s):
                raise dist.DistBackendError(f"{self._what()} took over {limit_s:g} s")
            if self._error is not None:
                raise self._error
            return True
        try:
            for handle in self._handles:
                handle.wait(*[limit] if limit else ())
        except CommError as error:
            raise dist.DistBackendError(str(error)) from error
        self._end()
        return True

    def finish(self) -> None:
        """Waits in a thread of its own; DistBackendError: it failed."""
        try:
            for handle in self._handles:
                handle.finish()
        except CommError as error:
            raise dist.DistBackendError(str(error)) from error
        self._end()

    def _what(self) -> str:
        parts = (h._what() if isinstance(h, HiresWork) else h.call.what for h in self._handles)
        return ", ".join(dict.fromkeys(parts))

    def _end(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()

    def synchronize(self) -> None:
        """Waits."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it ended, well or not."""
        if self._ended is not None:
            return self._ended.is_set()
        return all(handle.is_completed() for handle in self._handles)

    def is_success(self) -> bool:
        """Whether it ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Returns why it failed; None: it has not, or is under way."""
        if self._ended is not None:  # the thread has not ended, or says how
            return self._error if self._ended.is_set() else None
        errors = (handle.exception() for handle in self._handles)
        return next((error for error in errors if error is not None), None)

    def result(self) -> list[Any]:
        """Returns the tensors that it fills."""
        return self._results

    def get_future(self) -> Future[Any]:
        """Returns the future of the tensors that it fills.

        A thread of its own waits for it, so that its callbacks may wait for other operations, as
        PowerSGD's do; for tensors of a device, whose streams are those of this thread, this one
        does.
        """
        if self._future is None:
            rows = (one if isinstance(one, list | tuple) else [one] for one in self._results)
            places = {one.device for row in rows for one in row if isinstance(one, Tensor)}
            gpus: list[Any] = [place for place in places if place.type == "cuda"]
            future = Future[Any](devices=gpus)
            if any(place.type != "cpu" for place in places):
                with contextlib.suppress(dist.DistBackendError):  # the future raises it
                    self.wait()
            if self.is_completed():
                self._settle(future)
            else:
                ended = threading.Event()
                run_in_thread(lambda: self._settle(future, ended))
                self._ended = ended
            # An error that is set is a value to torch's C++: DistributedDataParallel would take it
            # for tensors, and end by SIGSEGV. One that a callback raises is an error.
            self._future = future.then(self._outcome)
        return self._future

    def _outcome(self, _: Future[Any]) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._results

    def _settle(self, future: Future[Any], ended: threading.Event | None = None) -> None:
        try:
            self.finish()
        except Exception as error:
            self._error = error
        if ended is not None:
            ended.set()
        future.set_result(self._results)
