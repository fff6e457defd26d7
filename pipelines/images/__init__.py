"""Checks and re-encodes images."""
