"""The folder of a run: its names, its lock, its copy in a bucket, its checkpoints."""
