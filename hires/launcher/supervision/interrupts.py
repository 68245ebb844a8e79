"""Counts signals, so that the supervisor handles them between its steps, not inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """Counts signals that end a run (SIGINT, SIGTERM, SIGHUP), and SIGUSR2, while it is entered.

    Only the main thread can set handlers: elsewhere nothing is counted and nothing changes. A
    signal that was ignored before (``nohup``) stays ignored. Afterwards the former handlers return.
    """

    def __init__(self) -> None:
        self.count = 0
        self.requests = 0
        """How often SIGUSR2 came, by which a scheduler asks a run to save its state and end."""
        self.received: list[signal.Signals] = []
        """All in order, SIGUSR2 at most once: what is to be passed on."""
        self.name = ""
        """The first signal, as it is shown."""
        self.number = signal.SIGINT
        """The last signal."""
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._handle)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})  # held since the start
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.take(number)

    def take(self, number: int) -> None:
        """Counts a signal."""
        if number == signal.SIGUSR2:
            self.requests += 1
            self.received += [signal.SIGUSR2] if self.requests == 1 else []
        else:
            shown = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self.count_signal(signal.Signals(number), shown)

    def count_signal(self, number: signal.Signals, name: str) -> None:
        """Counts a signal that ends a run; ``name``: as it is shown."""
        self.name = self.name or name
        self.number = number
        self.received.append(number)
        self.count += 1
