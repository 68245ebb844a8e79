"""Frames and plans become figures."""
