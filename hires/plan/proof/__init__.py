"""Proves that a plan cannot deadlock, and explains in words why one does."""
