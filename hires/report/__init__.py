"""Run folders become tables."""
