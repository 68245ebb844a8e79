"""Composes the config from Hydra's groups and the overrides on the command line."""
