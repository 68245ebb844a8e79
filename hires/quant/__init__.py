"""Quantised inference: how real numbers become integers, and the arithmetic on these."""
