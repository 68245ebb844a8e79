"""Holds the codecs of messages, one class each; every module here is found by scanning.

A module imports no torch but in methods that compute: configs and plans need none.
"""
