"""What is plainly a label, and what is said of samples without one: one answer for all sources and the writer."""

import re

NO_LABEL = -1
MAX_LABEL = 1_000_000
"""A label is the number of a class; a larger number is something else."""

MAX_UNUSED = 100_000
"""So many numbers below the largest label may be unused. Each costs a manifest about 50 bytes."""

_WHOLE = re.compile(r"\s*([+-]?\d+)(\.0*)?\s*", re.ASCII)


def plain_label(value: object) -> int | None:
    r"""The label that a value plainly says: a whole number, also as text or float, such as `7`, `7.0` or `" 07\n"`.

    None for all else, such as `True`, `7.5` or `"cat"`. The caller checks that it is from 0 to MAX_LABEL, or NO_LABEL.
    """
    if isinstance(value, bytes):
        value = value.decode("ascii", "replace")
    if isinstance(value, str):
        number = _WHOLE.fullmatch(value)
        value = int(number[1][:20]) if number else None  # 20 digits are too large too, and int() has a limit
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int else None


def unlabelled(num_without: int, num_samples: int, looked_for: str = "") -> list[str]:
    """The sentence on samples without a label, in a list that is empty if all have one.

    `looked_for` says in words where labels are expected, and what to do if they are elsewhere.
    """
    where = f"; looked for {looked_for}" if looked_for else ""
    return [f"{num_without:,} of {num_samples:,} samples have no label{where}"] if num_without else []


def unused(largest: int, num_used: int) -> list[str]:
    """The sentence on the labels from 0 to the largest that no sample has, in a list that is empty if all are used."""
    number = largest + 1 - num_used
    return [f"labels are 0 to {largest}, {number:,} of them unused"] if number else []


def why_sparse(largest: int, num_used: int) -> str:
    """Why labels are ids and no numbers of classes: too many are unused; "" if they are not."""
    if largest + 1 - num_used <= MAX_UNUSED:
        return ""
    [what] = unused(largest, num_used)
    return f"{what}, at most {MAX_UNUSED:,} may be: are they ids? number the classes from 0, or give them names"
