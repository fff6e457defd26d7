"""A raw sample as a user's own pipeline makes it."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Raw(NamedTuple):
    """One raw sample: its key, the bytes of an encoded image, its label, and further fields.

    No other sample of the set may have the same `key`. `image` is None for a sample without one.
    `label` is a number from 0, the name of a class, or None. `fields` maps an extension such as
    `txt` or `mask.png` to bytes, to text, or to what JSON can hold; a field that is None is left
    out.
    """

    key: str
    image: bytes | None = None
    label: int | str | None = None
    fields: Mapping[str, Any] = {}
