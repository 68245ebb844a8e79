"""Holds the classes of backends, and what they share; ``hires.backends`` names the classes."""
