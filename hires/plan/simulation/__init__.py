"""Predicts how long a step of a plan takes."""
