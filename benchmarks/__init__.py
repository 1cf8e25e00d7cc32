"""Measurements against peers."""
