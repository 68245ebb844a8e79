"""Holds the classes of backends; each file registers its own in ``BACKENDS`` of :mod:`.backend`."""
