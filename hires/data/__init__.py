"""Labelled images, of which every rank reads only its own window."""
