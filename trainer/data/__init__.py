"""What a run trains on: streams of a shard set or of synthetic batches, and their way to the
device.
"""
