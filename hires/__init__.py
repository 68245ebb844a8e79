"""Distributed deep learning on high-resolution images: layouts, proofs, runs and records."""

__version__ = "0.1.0"
