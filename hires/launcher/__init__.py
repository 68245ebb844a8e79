"""Starts the ranks of a run, watches them, and never leaves one behind."""
