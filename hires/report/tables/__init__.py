"""Turns runs into tables and files of tables."""
