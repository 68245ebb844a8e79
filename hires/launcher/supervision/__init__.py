"""Watches the ranks of an attempt from the first start to the last exit."""
