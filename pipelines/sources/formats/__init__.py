"""Readers of raw files that several sources share."""
