"""Demonstrations on embedded data."""
