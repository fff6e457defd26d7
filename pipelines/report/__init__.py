"""The page about a shard set."""
