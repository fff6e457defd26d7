"""Reads a shard set and trains on it, with plain PyTorch or PyTorch/XLA. `shardset
train --help`.
"""
