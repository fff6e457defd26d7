"""The verb `report`: one HTML page about a shard set."""
