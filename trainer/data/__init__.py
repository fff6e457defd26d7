"""Batches for the loop, and their way to the device."""
