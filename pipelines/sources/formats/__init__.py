"""Readers of raw files, shared by the sources."""
