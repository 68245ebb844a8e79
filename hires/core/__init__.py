"""Errors, config, run folder and records: what everything else stands on."""
