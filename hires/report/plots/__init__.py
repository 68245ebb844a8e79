"""Plots of a report: each file draws one or more and registers them under ``@plot``."""
