"""Renders a report as one HTML page that opens in any browser."""
