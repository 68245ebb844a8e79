"""Holds the metrics, one class each; every module here is found by scanning.

A module imports no torch but in methods that compute: configs, plans and reports need none.
"""
