"""The format on disk: manifest, names, tar, index."""
