"""Beam's `--setup_file ./setup.py` runs this; pyproject.toml has the rest of the metadata."""

from setuptools import setup

# In pyproject.toml it would need setuptools 77, and a fresh environment of Python 3.11 has 65.
setup(license="Apache-2.0")
