"""Reads samples by ranges and verifies their bytes."""
