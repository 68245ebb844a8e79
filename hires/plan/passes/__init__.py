"""Rewrites the network of an inference into one of fewer operators that computes the same."""
