"""Prices of a bucket. They are in this file only, and each has a flag of `plan`.

Source: Google's price list, https://cloud.google.com/storage/pricing, Standard storage in one region of North America
(us-central1), US dollars, as of 2026-09-20. Writes and lists are class A operations, reads and metadata requests class
B. Reading inside the bucket's region costs nothing for the bytes. Taxes, discounts and free quotas are not counted, nor
is traffic to another region, except where it is named: EGRESS.
"""

from dataclasses import dataclass, fields

from shardset.errors import ConfigError

GIB = 2**30

EGRESS = 0.02
"""US dollars for a GiB from one region to another in North America; $0.05 and more to another continent."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """US dollars for a GiB a month, and for 1,000 operations of each class."""

    storage: float = 0.020
    class_a: float = 0.005
    class_b: float = 0.0004

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= (value := getattr(self, field.name)) < float("inf"):
                raise ConfigError(f"--price-{field.name.replace('_', '-')} is {value}, expected dollars from 0")

    def month(self, num_bytes: float) -> float:
        """The price of storing `num_bytes` for a month."""
        return num_bytes / GIB * self.storage

    def requests(self, *, class_a: int = 0, class_b: int = 0) -> float:
        """The price of these operations."""
        return (class_a * self.class_a + class_b * self.class_b) / 1000
