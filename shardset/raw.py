"""A raw sample as a user's own pipeline makes it."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Raw(NamedTuple):
    """One raw sample, as `pipelines.WriteShards` takes it.

    Attributes:
        key: Its name; no other sample of the set may have it.
        image: The bytes of an encoded image; None for a sample without one.
        label: A number from 0, the name of a class, or None.
        fields: Further fields by their extensions, such as `txt` or `mask.png`: bytes, text, or
            what JSON can hold. One that is None is left out.
    """

    key: str
    image: bytes | None = None
    label: int | str | None = None
    fields: Mapping[str, Any] = {}
