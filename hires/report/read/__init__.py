"""Reads run folders into plain rows for tables and plots."""
