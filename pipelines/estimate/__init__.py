"""Estimates what a shard set takes to build, store and read: the verb `plan`."""
