"""Runs one rank: data, precision, training and inference steps, verification, metrics."""
