"""The transforms that other pipelines use: `from pipelines import ReadShards, WriteShards`."""
