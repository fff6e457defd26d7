"""A shard set as batches in the exact order."""
