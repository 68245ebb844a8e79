"""Holds the trackers, one class each; every module here is found by scanning.

A module imports the tool in ``open`` only: configs and plans need none.
"""
