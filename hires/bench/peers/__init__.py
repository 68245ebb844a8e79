"""What a row is built from, one module ``peer_NAME`` for each: hires, and libraries beside it.

A module has ``build(row, rank, device)``, which returns the row's :class:`Runner` on this rank;
``lacks(row)``, if there are rows that it cannot run, returns why; ``CONVERTED`` is true of
libraries that read a file of the network, which is compared with the others as it is timed.
"""
