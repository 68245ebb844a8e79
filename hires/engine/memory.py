"""How much memory does this process use?"""

from __future__ import annotations

from pathlib import Path


def rss_bytes() -> int:
    """Returns the resident memory of this process."""
    return _status("VmRSS")


def peak_rss_bytes() -> int:
    """Returns the largest resident memory since :func:`reset_peak`, or since the start."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Begins to count the peak anew; where the kernel does not allow it, the old peak stands."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _status(field: str) -> int:
    """Returns a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0
