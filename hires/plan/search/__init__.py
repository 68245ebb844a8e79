"""Searches for layouts that would fit where the one that was asked for does not."""
