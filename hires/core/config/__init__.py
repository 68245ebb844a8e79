"""The config schema: dataclasses that hold every key and its default."""
