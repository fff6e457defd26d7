"""What a bucket costs. The only place where a price stands; every one has a flag of `plan`.

Google's price list, https://cloud.google.com/storage/pricing: Standard storage in one region of North America
(us-central1), US dollars, as of 2026-09-20. A list or a write is a class A operation, a read or a look at an
object's metadata is class B. Reading in the bucket's own region costs nothing for the bytes; other places are not
counted here, and neither are taxes, discounts and free quotas.
"""

from dataclasses import dataclass, fields

from shardset.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Prices:
    """In US dollars: a GiB for a month, and 1,000 operations of each class."""

    storage: float = 0.020
    class_a: float = 0.005
    class_b: float = 0.0004

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= (value := getattr(self, field.name)) < float("inf"):
                raise ConfigError(f"--price-{field.name.replace('_', '-')} is {value}, expected dollars from 0")

    def month(self, num_bytes: float) -> float:
        """Keeping so many bytes for a month."""
        return num_bytes / GIB * self.storage

    def requests(self, *, class_a: int = 0, class_b: int = 0) -> float:
        """So many operations."""
        return (class_a * self.class_a + class_b * self.class_b) / 1000
