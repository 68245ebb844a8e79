"""Holds the augmentations, one class each; every module here is found by scanning.

A module imports NumPy only in methods that compute: configs need none.
"""
