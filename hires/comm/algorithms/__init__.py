"""Algorithms that carry out one operation as several of a backend."""
