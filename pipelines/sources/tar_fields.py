"""The fields of a split, and which of them are parts of keys: `22.05.png` is field `05.png` of
sample 22.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from shardset.errors import SourceError
from shardset.format.naming import DOTS
from shardset.format.rows import MAX_FIELDS

MAX_FRAMES = 32
"""So many fields that differ by a number alone may be frames of fewer samples."""

_NUMBER = re.compile(r"\d+(?=.*\.)|(?<![^.])\d+$", re.ASCII)
"""Not in an extension: `mp4`."""


def count_fields(samples: Iterable[Iterable[str]]) -> dict[str, int]:
    """The number of samples with each field, in the order in which they come.

    Under a name with `#` for its numbers, the number of samples with any field that differs by them
    alone.
    """
    counts = Counter[str]()
    for fields, num_samples in Counter(map(tuple, samples)).items():
        counts.update(dict.fromkeys([*fields, *map(_shape, fields)], num_samples))
    return counts


def checked_fields(where: str, counts: Mapping[str, int]) -> list[str]:
    """The fields that were counted; raises SourceError if they are too many, or parts of keys.

    Those differ by numbers, of which none is in all samples, or which outnumber the samples. Views
    and frames (`cam0.png`, `cam1.png`) are in all samples, or at least the first one is.
    """
    fields = [field for field in counts if "#" not in field]
    if len(fields) > MAX_FIELDS:
        raise SourceError(
            f"{where}: {len(fields):,} kinds of fields ({', '.join(fields[:3])}, ...) are more "
            f"than an index can list; {DOTS}"
        )
    for shape in counts.keys() - fields:
        alike, num_samples = [field for field in fields if _shape(field) == shape], counts[shape]
        num_most = max(counts[field] for field in alike)
        many = MAX_FRAMES if num_samples > 1 else 1
        if num_most < num_samples or len(alike) > max(num_samples, many):
            raise SourceError(
                f"{where}: its fields differ by numbers from sample to sample, such as "
                f"{alike[0]} and {alike[1]}; {DOTS}"
            )
    return fields


def _shape(field: str) -> str:
    return _NUMBER.sub("#", field)
