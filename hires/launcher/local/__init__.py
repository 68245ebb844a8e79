"""The local launcher and its queue."""
