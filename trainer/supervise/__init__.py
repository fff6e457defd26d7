"""Heartbeats, the run lock and signals."""
