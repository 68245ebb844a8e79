"""Sweeps: many runs from one command."""
