"""Holds what the planner must know of each communication library; modules are found by scanning.

They import no torch but where a rank asks for the class, since configs and plans need none.
"""
