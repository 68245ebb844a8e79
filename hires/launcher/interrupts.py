"""How does the supervisor hear Ctrl-C without being torn out of what it does?

Signals are only counted here; the supervisor looks at the count, stops the ranks and writes down
how the run ended. SIGUSR2 asks it to make way: the ranks may save their state before they end.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

_SPOKEN = {"SIGINT": "Ctrl-C"}


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP while it is entered; then the former handlers are back.

    SIGUSR2 is noted, too, but is no interrupt.

    Only the main thread can set handlers: elsewhere nothing is counted and nothing changes. A
    signal that was ignored before (``nohup``) stays ignored.
    """

    def __init__(self) -> None:
        """Starts with nothing counted."""
        self.count = 0
        self.name = ""
        """The first signal, as a person would call it."""
        self.make_way = False
        """Whether SIGUSR2 came."""
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._hear)
            self._former[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Counts one signal."""
        if number == signal.SIGUSR2:
            self.make_way = True
            return
        name = signal.Signals(number).name
        self.name = self.name or _SPOKEN.get(name, name)
        self.count += 1
