"""Compares runs with runs or references: ratios, their confidence, and verdicts."""
