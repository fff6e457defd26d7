"""The test for labels, and the note on samples without one: one answer for all sources and
the writer.
"""

import re
import unicodedata
from collections.abc import Mapping

import numpy as np

from shardset.errors import SourceError

NO_LABEL = -1
MAX_LABEL = 1_000_000
"""A label is the number of a class; a larger number is something else."""

MAX_UNUSED = 100_000
"""So many numbers below the largest label may be unused. Each costs a manifest about 50 bytes."""

_WHOLE = re.compile(r"\s*([+-]?\d+)(\.0*)?\s*", re.ASCII)


def class_name(text: str) -> str:
    """The name of a class as sets have it, however Unicode spells its accents: in NFC."""
    return unicodedata.normalize("NFC", text)


def plain_label(value: object) -> int | None:
    r"""The label that a value plainly says: a whole number, also as text or float, such as `7`,
    `7.0` or `" 07\n"`.

    None for all else, such as `True`, `7.5` or `"cat"`. The caller checks that it is from 0 to
    MAX_LABEL, or NO_LABEL.
    """
    if isinstance(value, bytes):
        value = value.decode("ascii", "replace")
    if isinstance(value, np.number):
        value = value.item()
    if isinstance(value, str):
        number = _WHOLE.fullmatch(value)
        # 20 digits are too large too, and int() has a limit
        value = int(number[1][:20]) if number else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int else None


def why_sparse(largest: int, num_used: int) -> str:
    """Why labels are ids and no numbers of classes: too many are unused; "" if they are not."""
    if largest + 1 - num_used <= MAX_UNUSED:
        return ""
    return (
        f"{_unused(largest, num_used)}, at most {MAX_UNUSED:,} may be: are they ids? number the "
        "classes from 0, or give them names"
    )


def notes_on(
    where: str,
    totals: Mapping[int, int],
    largest: int = NO_LABEL,
    looked_for: str = "",
) -> list[str]:
    """Sentences on labels from 0 to `largest` that no sample has, and on samples without a label.

    `totals` has the number of samples of each label. `looked_for` says in words where labels are
    expected, and what to do if they are elsewhere. Raises SourceError if too many are unused.
    """
    notes, num_used = [], len(totals.keys() - {NO_LABEL})
    if why := why_sparse(largest, num_used):
        raise SourceError(f"{where}: {why}")
    if num_used <= largest:
        notes.append(_unused(largest, num_used))
    if without := totals.get(NO_LABEL, 0):
        looked = f"; looked for {looked_for}" if looked_for else ""
        notes.append(f"{without:,} of {sum(totals.values()):,} samples have no label{looked}")
    return notes


def _unused(largest: int, num_used: int) -> str:
    return f"labels are 0 to {largest}, {largest + 1 - num_used:,} of them unused"
