"""Starts the processes of a world and talks to them."""
