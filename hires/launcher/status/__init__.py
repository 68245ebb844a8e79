"""The state, progress and logs of runs."""
