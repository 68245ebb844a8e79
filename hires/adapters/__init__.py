"""Fits :func:`hires.shard` into other libraries; each module imports the one that it is for.

pip install 'hires[adapters]'; the recipes are in docs/library.md.
"""
