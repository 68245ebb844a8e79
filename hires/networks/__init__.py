"""Holds the networks, one a module, which is named after it; every module is found by scanning.

The first line of a module says what the network is: it is read without importing torch.
"""
