"""The run store: the only reader and writer of run folders."""
