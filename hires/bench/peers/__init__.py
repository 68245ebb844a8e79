"""What a row is built from: hires, and libraries beside it.

Each is a subclass of :class:`hires.bench.bench_rows.PeerSteps`, registered under its name.
"""
