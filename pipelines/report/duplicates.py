"""Samples with the same image: found by size and CRC32C, then compared byte for byte."""

import hashlib
from dataclasses import dataclass

import numpy as np

from pipelines.check.problems import Problem
from pipelines.report import near_duplicates
from pipelines.report.catalog import Catalog
from pipelines.report.samples import Fields, image_of, read_samples
from shardset.storage.base import Storage

MAX_COMPARED = 400
"""Limit for groups of equal size and CRC32C that are compared byte for byte; the rest are shown as unconfirmed."""

MAX_MEMBERS_COMPARED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateGroup:
    """Samples with the same image: numbers of the catalog, and over how many splits and labels they spread.

    `confirmed` if they were compared byte for byte.
    """

    samples: tuple[int, ...]
    num_splits: int
    num_labels: int
    confirmed: bool


def find_duplicates(storage: Storage, catalog: Catalog) -> tuple[list[DuplicateGroup], list[Problem]]:
    """Groups of samples with the same image, those over several splits first; copies made by a build do not count."""
    originals = np.flatnonzero((catalog.copy == 0) & (catalog.image_bytes > 0))
    equal = near_duplicates.equal_groups(catalog.image_crc32c[originals], catalog.image_bytes[originals])
    groups = [originals[group] for group in equal]
    # The most serious first: only so many groups are compared.
    groups.sort(key=lambda group: (-len(np.unique(catalog.split[group])), -len(np.unique(catalog.label[group]))))
    candidates = [group.tolist() for group in groups[:MAX_COMPARED]]
    compared = np.array([sample for group in candidates for sample in group[:MAX_MEMBERS_COMPARED]], np.int64)
    digests, damage = read_samples(storage, catalog, compared, _digest)
    duplicates = [
        *(_group(catalog, same, confirmed=True) for group in candidates for same in _same(group, digests)),
        *(_group(catalog, group.tolist(), confirmed=False) for group in groups[MAX_COMPARED:]),
    ]
    return sorted(duplicates, key=lambda group: (-group.num_splits, -group.num_labels, group.samples)), damage


def _same(group: list[int], digests: dict[int, bytes]) -> list[list[int]]:
    """The group divided into samples of equal bytes; members that were not read go by their CRC32C."""
    by_digest: dict[bytes, list[int]] = {}
    for sample in group[:MAX_MEMBERS_COMPARED]:
        if sample in digests:
            by_digest.setdefault(digests[sample], []).append(sample)
    same = [samples for samples in by_digest.values() if len(samples) > 1]
    if len(by_digest) == 1 and same:  # then the members that were not read are most likely equal too
        same[0] += group[MAX_MEMBERS_COMPARED:]
    return same


def _group(catalog: Catalog, samples: list[int], *, confirmed: bool) -> DuplicateGroup:
    """A group whose first samples, which the page shows, have different splits and labels."""
    firsts = {(int(catalog.split[sample]), int(catalog.label[sample])): sample for sample in reversed(samples)}
    return DuplicateGroup(
        samples=tuple(dict.fromkeys([*reversed(firsts.values()), *samples])),
        num_splits=len({split for split, _ in firsts}),
        num_labels=len({label for _, label in firsts}),
        confirmed=confirmed,
    )


def _digest(fields: Fields) -> bytes:
    return hashlib.sha256(image_of(fields)).digest()
