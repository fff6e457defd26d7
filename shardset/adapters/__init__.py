"""Doors to other loaders, each with one optional library."""
