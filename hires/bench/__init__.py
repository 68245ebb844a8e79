"""Measures on this machine: layouts beside one process and beside torch's own."""
