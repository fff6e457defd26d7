"""Which ids of a split an epoch takes, as one sorted list: those that it keeps or those that it
leaves out.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Selection:
    """Some of the ids 0 to `num_ids` - 1: if `keeps` those in `ids`, else all others; `ids` ascend.

    `digest` belongs to the view that chose them, "" if none did.
    """

    num_ids: int
    ids: Ints = field(default_factory=lambda: _NONE, repr=False)
    keeps: bool = False
    digest: str = ""

    @classmethod
    def from_kept(cls, kept: Ints, num_ids: int, digest: str = "") -> Self:
        """The selection of ascending ids; holds the others if they are fewer."""
        if 2 * len(kept) <= num_ids:
            return cls(num_ids, kept, keeps=True, digest=digest)
        is_left_out = np.ones(num_ids, bool)
        is_left_out[kept] = False
        return cls(num_ids, np.flatnonzero(is_left_out), digest=digest)

    @property
    def num_kept(self) -> int:
        """The number of ids that are taken."""
        return len(self.ids) if self.keeps else self.num_ids - len(self.ids)

    def has(self, ids: Ints) -> NDArray[np.bool_]:
        """Whether each id is taken; of the same shape."""
        is_taken: NDArray[np.bool_] = self.num_before(ids + 1) > self.num_before(ids)
        return is_taken

    def num_before(self, ids: Ints) -> Ints:
        """The number of smaller ids that are taken; of the same shape."""
        if not self.keeps and not len(self.ids):
            return ids
        smaller = np.searchsorted(self.ids, ids)
        return smaller if self.keeps else ids - smaller

    def id_of(self, numbers: Ints) -> Ints:
        """The inverse: the ids with so many taken ids before them.

        Numbers are 0 to `num_kept` - 1.
        """
        if self.keeps:
            taken: Ints = self.ids[numbers]
            return taken
        return (
            numbers + np.searchsorted(self._kept_before, numbers, side="right")
            if len(self.ids)
            else numbers
        )

    @cached_property
    def _kept_before(self) -> Ints:
        """The number of taken ids before each that is left out."""
        return self.ids - np.arange(len(self.ids))
