"""The checks of ``hires doctor``."""
