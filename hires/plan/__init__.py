"""Decides who holds what, who sends what, and in which order; imports no torch."""
