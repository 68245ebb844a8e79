"""Tells the state of runs: progress, logs, process, cancellation."""
