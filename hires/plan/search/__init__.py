"""Searches for layouts near to the one that was asked for, and words the advice."""
