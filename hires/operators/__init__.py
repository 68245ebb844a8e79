"""Holds operators whose kernels stand beside what the planner must know of them.

Every module here is found by scanning. It imports no torch but in its kernels, since planning needs
none.
"""
