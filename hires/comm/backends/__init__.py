"""Holds the backends, one file each behind one protocol, and what they stand on."""
