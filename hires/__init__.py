"""Distributed deep learning on high-resolution images: layouts, proofs, runs and records."""

from hires.core.python_path import remove_current_folder

__version__ = "0.1.0"

remove_current_folder()  # before anything else is imported
