"""Measurements on this machine, each beside its baseline."""
