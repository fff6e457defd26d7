"""Verifies and inspects shard sets."""
