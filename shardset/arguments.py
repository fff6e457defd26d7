"""Checks of the numbers that callers pass."""

import operator
from typing import SupportsIndex

from shardset.errors import ConfigError


def require_int(name: str, value: SupportsIndex) -> int:
    """`value` as a Python int, whatever its library; raises ConfigError for text, a fraction or None."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}, expected a whole number") from None
