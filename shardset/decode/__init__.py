"""Decodes and crops images."""
