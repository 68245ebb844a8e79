"""The local launcher."""
