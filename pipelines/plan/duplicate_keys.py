"""Finds samples that want the same key: spreads the hashes of keys over buckets, then sorts each
bucket alone.
"""

from collections.abc import Iterable

import numpy as np

from pipelines.plan import layout, paths, tables
from pipelines.plan.files import ByteRange, PlanFiles, read_slices, write_slices
from pipelines.plan.records import PlanFile

KEY = np.dtype([("hash", "<u8"), ("unit", "<u4"), ("row", "<u4")])
DUPLICATE = np.dtype([("unit", "<u4"), ("row", "<u4"), ("number", "<u4")])
"""A row with the same key as `number` rows before it."""


def spread_keys(files: PlanFiles, plan: PlanFile, batch: int) -> list[tuple[int, ByteRange]]:
    """Writes the key hashes of a batch of units by bucket; returns (bucket, byte range) pairs."""
    units = plan.units_of(batch)
    keys = np.concatenate(
        [
            _keys(unit, table["key_hash"].to_numpy())
            for unit, table in zip(units, tables.read_units(files, units, "key_hash"), strict=True)
        ]
    )
    bucket = (keys["hash"] % np.uint64(layout.num_buckets(plan.splits.values()))).astype(np.uint16)
    keys = keys[np.argsort(bucket, kind="stable")]
    slices = (
        (number, keys[start:stop].tobytes())
        for number, start, stop in tables.runs_of(np.sort(bucket))
    )
    return write_slices(files, paths.slice_path("keys", batch), slices)


def find_duplicate_keys(
    files: PlanFiles, plan: PlanFile, bucket: int, slices: Iterable[ByteRange]
) -> list[tuple[int, ByteRange]]:
    """Writes the rows of a bucket whose key is taken, by batch of units; returns (batch, byte
    range) pairs.

    `slices` hold all keys of the bucket. Writes nothing if all keys differ.
    """
    keys = np.concatenate([np.frombuffer(data, KEY) for data in read_slices(files.output, slices)])
    duplicates = duplicates_among(keys)
    if not len(duplicates):
        return []
    batches = tables.runs_of(duplicates["unit"] // plan.units_per_batch)
    by_batch = ((batch, duplicates[start:stop].tobytes()) for batch, start, stop in batches)
    return write_slices(files, paths.slice_path("duplicate_keys", bucket), by_batch)


def duplicates_among(keys: np.ndarray) -> np.ndarray:
    """The rows whose key is taken by earlier rows, in (unit, row) order."""
    hashes = np.sort(keys["hash"])
    repeated = hashes[1:][hashes[1:] == hashes[:-1]]
    keys = keys[np.isin(keys["hash"], repeated)]
    keys = keys[np.lexsort((keys["row"], keys["unit"], keys["hash"]))]
    _, firsts, group = np.unique(keys["hash"], return_index=True, return_inverse=True)
    duplicates = np.empty(len(keys), DUPLICATE)
    duplicates["unit"], duplicates["row"] = keys["unit"], keys["row"]
    duplicates["number"] = np.arange(len(keys)) - firsts[group]
    return np.sort(duplicates[duplicates["number"] > 0], order=["unit", "row"])


def duplicate_numbers(
    files: PlanFiles, slices: Iterable[ByteRange], units: range, first_rows: np.ndarray
) -> np.ndarray:
    """For each row of a batch of units, the number of rows before it with the same key.

    `first_rows` are the row numbers at which the units start, followed by the number of all rows.
    """
    numbers = np.zeros(first_rows[-1], np.int64)
    for data in read_slices(files.output, slices):
        duplicates = np.frombuffer(data, DUPLICATE)
        numbers[first_rows[duplicates["unit"] - units.start] + duplicates["row"]] = duplicates[
            "number"
        ]
    return numbers


def _keys(unit: int, hashes: np.ndarray) -> np.ndarray:
    keys = np.empty(len(hashes), KEY)
    keys["hash"], keys["unit"], keys["row"] = hashes, unit, np.arange(len(hashes))
    return keys
