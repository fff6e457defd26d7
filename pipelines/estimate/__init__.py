"""Estimates how a shard set is divided and read: the verb `estimate`."""
