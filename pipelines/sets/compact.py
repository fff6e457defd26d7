"""Forgets samples: publishes a version without them; only the shards that held them are new."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby

import msgspec
import numpy as np
import pyarrow as pa

from pipelines.export.stale import CARD
from pipelines.plan import files as plan_files
from pipelines.plan import tables
from pipelines.sets.keys import refuse_unknown
from pipelines.sets.retire import SINCE, Compacted, refuse_unfinished, retire, without
from pipelines.write import history, replace
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest, Quarantine, Shard, Split
from shardset.format.rows import (
    content_bytes,
    fields_of,
    first_images,
    keys_of,
    numbers,
    origins_of,
    ranges_of,
)
from shardset.format.shards import Group, StoredShards
from shardset.format.tar import StoredSample
from shardset.format.write import class_counts, write_shard, write_table
from shardset.program import count
from shardset.read.indexes import read_index
from shardset.storage.base import ABSENT, Storage
from shardset.storage.checked import read_object

_THREADS = 4
"""Shards that are written at the same time; each takes the memory of two."""

NOT_REACHED = (
    "not reached: object versions, soft-deleted objects and backups of the storage; copies of the "
    "set and caches of readers; views, and side files elsewhere; the raw input; models that were "
    "trained on it"
)


Dropped = Mapping[int, pa.Table]
"""The index rows of the samples to drop, by number of their shard in its split."""


def compact(
    url: str,
    keys: Collection[str],
    *,
    grace: timedelta,
    now: datetime,
    side_files: bool = False,
) -> Compacted:
    """Publishes the version without these samples, and removes older versions that have them.

    Files wait for `grace`, since readers that began on an older version end on it; the same call
    removes them later, or finishes one that was killed. Lines of quarantine lists that name the
    keys go too, and with `side_files` columns and exports with removed tars. With nothing written,
    raises ConfigError for a key that no version ever had, without keys, if no sample would be left,
    or for an unfinished build.
    """
    newest, storage = replace.newest_of(url)
    refuse_unfinished(storage, newest)
    if not keys:
        raise ConfigError("no key was given; list those to drop, one in each line")
    wanted = np.array(sorted({key.encode() for key in keys}))
    dropped = {name: _find(storage, split, wanted) for name, split in newest.splits.items()}
    rows = [one for of_split in dropped.values() for one in of_split.values()]
    held = {key.partition("@")[0] for one in rows for key in one["key"].to_pylist()}
    forgotten = {*newest.forgotten, *map(manifests.hash_of_key, held)}
    unknown = [key for key in keys if manifests.hash_of_key(key) not in forgotten]
    refuse_unknown(unknown, f"any version of {storage.url}")
    done = Compacted(
        num_samples=sum(map(len, rows)),
        num_shards=len(rows),
        same_images=_same_images(storage, newest, rows) if rows else [],
    )
    rejected = without(storage, newest, keys)
    if rows or rejected is not None:
        _publish(storage, newest, sorted(forgotten), dropped, rejected, now)
    return retire(storage, keys, done, grace=grace, now=now, side_files=side_files)


def _publish(
    storage: Storage,
    newest: Manifest,
    forgotten: list[int],
    dropped: Mapping[str, Dropped],
    rejected: list[bytes] | None,
    now: datetime,
) -> None:
    """Writes the next version, with `rejected` as its quarantine list unless that is None."""
    sizes = {name: sum(map(len, of_split.values())) for name, of_split in dropped.items()}
    splits = newest.splits.items()
    left = {name: split for name, split in splits if split.num_samples > sizes[name]}
    if not left:
        raise ConfigError(f"{storage.url}: no sample would be left; remove the set instead")
    note = f"version {newest.number + 1}: {count(sum(sizes.values()), 'sample')} dropped"
    if emptied := newest.splits.keys() - left:
        note += f", none left in {', '.join(sorted(emptied))}"
    identity = repr((newest.digest, forgotten, rejected))
    # The number tells a later compaction whether this one may still publish what it has written.
    suffix = f"-v{newest.number}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    storage.sweep()
    quarantine = newest.quarantine
    if rejected is not None:
        quarantine = Quarantine(count=len(rejected), path=naming.quarantine_path(suffix))
        storage.write(quarantine.path, b"".join(rejected), if_generation=ABSENT)
    for name, split in left.items():
        if dropped[name]:
            left[name] = _rewritten(storage, name, split, name + suffix, dropped[name])
    notes = [*newest.provenance.notes, note]
    version = msgspec.structs.replace(
        newest,
        digest="",
        number=newest.number + 1,
        splits=left,
        quarantine=quarantine,
        provenance=msgspec.structs.replace(newest.provenance, notes=notes),
        forgotten=forgotten,
    )
    # with the note of an earlier compaction old files would not wait
    storage.write(SINCE, msgspec.json.encode(now))
    history.publish(storage, newest, manifests.seal(version))


def lines(done: Compacted) -> list[str]:
    """The result as lines for a terminal."""
    found = [
        f"version {done.version}: {count(done.num_samples, 'sample')} dropped, "
        f"{count(done.num_shards, 'shard')} written again"
    ]
    if done.same_images:
        found.append(
            f"the same images stay under other keys: {', '.join(done.same_images)}; drop these keys"
            " too"
        )
    if done.waiting:
        found.append(
            f"{count(done.waiting, 'old file')} wait: give the same command again after"
            f" {done.after}"
        )
    if done.tags:
        what = "wait" if done.waiting else "were removed"
        found.append(f"tags of versions that {what}: {', '.join(done.tags)}")
    if done.side_files:
        found.append(
            f"may still name dropped samples or old tars: {', '.join(done.side_files)}; make them"
            f" again (`shardset export --overwrite`), or --side-files removes all but {CARD}, once"
            " nothing waits"
        )
    found += [f"{note}; give the same command again when that is allowed" for note in done.kept]
    if done.removed:
        found += [
            f"removed {count(sum(done.removed.values()), 'file')}, {done.num_bytes / 1e6:,.1f} MB",
            NOT_REACHED,
        ]
    return found


def _find(storage: Storage, split: Split, wanted: np.ndarray) -> Dropped:
    """The samples of these keys, and copies of them."""

    def look(shard: Shard) -> pa.Table:
        index = read_index(storage, shard)
        return index.filter(np.isin(np.char.partition(keys_of(index), b"@")[:, 0], wanted))

    found = enumerate(plan_files.in_order(storage, split.shards, look))
    return {number: rows for number, rows in found if len(rows)}


def _same_images(storage: Storage, newest: Manifest, dropped: Sequence[pa.Table]) -> list[str]:
    """The keys of samples that stay, though their images are equal to dropped ones."""
    images = np.concatenate([*map(_images_of, dropped)])
    keys = np.concatenate([*map(keys_of, dropped)])

    def same(shard: Shard) -> list[str]:
        index = read_index(storage, shard)
        is_same = np.isin(_images_of(index), images[images > 0]) & ~np.isin(keys_of(index), keys)
        names: list[str] = index["key"].filter(is_same).to_pylist()
        return names

    return [key for found in plan_files.in_order(storage, newest.shards, same) for key in found]


def _images_of(index: pa.Table) -> np.ndarray:
    """The CRC32C and the size of each sample's first image as one number; 0 if it has none."""
    found: np.ndarray = numbers(index, "image_crc32c") * np.uint64(2**32)
    return found + first_images(index)[1].astype(np.uint64)


def _rewritten(storage: Storage, name: str, split: Split, folder: str, dropped: Dropped) -> Split:
    """A split without the dropped rows; writes the shards that lose some, and tables,
    to `folder`.
    """
    shards = list(split.shards)

    def rewrite(number: int) -> Shard:
        path = naming.shard_path(folder, name, number)
        return _rewrite(storage, shards[number], keys_of(dropped[number]), path)

    changed = [number for number in dropped if len(dropped[number]) < shards[number].num_samples]
    with ThreadPoolExecutor(_THREADS) as threads:
        new = dict(zip(changed, threads.map(rewrite, changed), strict=True))
    left = {number: shard for number, shard in enumerate(shards) if number not in dropped} | new
    labels = np.concatenate([numbers(rows, "label") for rows in dropped.values()])
    copies = np.concatenate([numbers(rows, "copy") for rows in dropped.values()])
    totals = split.class_totals - class_counts(labels, len(split.class_totals))
    contents = sum(map(content_bytes, dropped.values()))
    return msgspec.structs.replace(
        split,
        num_samples=split.num_samples - len(copies),
        num_dropped=split.num_dropped + int((copies == 0).sum()),
        num_repeats=split.num_repeats - int((copies > 0).sum()),
        num_content_bytes=split.num_content_bytes - contents,
        num_tar_bytes=sum(shard.num_bytes for shard in left.values()),
        max_tar_bytes=max(shard.num_bytes for shard in left.values()),
        class_totals=totals.tolist(),
        shards=StoredShards([*_groups(storage, name, split, folder, left, new.keys())]),
    )


def _rewrite(storage: Storage, shard: Shard, dropped: np.ndarray, path: str) -> Shard:
    """The shard without the dropped keys, which it writes to `path`."""
    index = read_index(storage, shard)
    kept = index.filter(~np.isin(keys_of(index), dropped))
    advice = "restore the shard, or build it again, before samples are dropped"
    tar = memoryview(read_object(storage, shard.path, shard.num_bytes, shard.crc32c, advice))
    create = partial(storage.writer, if_generation=ABSENT)
    written, _ = write_shard(path, _samples_of(tar, kept), fields_of(kept.column_names), create)
    # for `repair`
    if file := plan_files.find(storage, naming.references_of(shard.path)):
        references = tables.references_from_bytes(file.content)
        is_kept = np.isin(index["key"], kept["key"])
        content = tables.references_to_bytes(tables.take(references, np.flatnonzero(is_kept)))
        name = naming.references_of(path)
        plan_files.write(storage, name, file.build, content, if_generation=ABSENT)
    return written.shard


def _samples_of(tar: memoryview, index: pa.Table) -> Iterator[StoredSample]:
    """The samples of some rows, whose fields are in the order of the tar."""
    fields = fields_of(index.column_names)
    starts, sizes = np.array([ranges_of(index, field) for field in fields]).transpose(1, 2, 0)
    facts = (index[name].to_pylist() for name in ("key", "label", "serial", "copy"))
    rows = zip(*facts, origins_of(index), starts.tolist(), sizes.tolist(), strict=True)
    for key, label, serial, copy, origin, begins, lengths in rows:
        stored = sorted(
            (begin, field, length)
            for begin, field, length in zip(begins, fields, lengths, strict=True)
            if begin
        )
        contents = [(field, tar[begin : begin + length]) for begin, field, length in stored]
        yield StoredSample(
            key=key, fields=contents, label=label, serial=serial, copy=copy, origin=origin
        )


def _groups(
    storage: Storage,
    name: str,
    split: Split,
    folder: str,
    left: Mapping[int, Shard],
    new: Set[int],
) -> Iterator[Group]:
    """The groups of a split: each old one whole, or cut where shards are new or gone.

    Writes the tables of those that are cut.
    """
    start = num_tables = 0
    for group in split.groups:
        numbers = range(start, start + group.num_shards)
        start = numbers.stop
        if left.keys() >= set(numbers) and new.isdisjoint(numbers):
            yield group
            continue
        for (is_left, is_new), run in groupby(numbers, lambda n: (n in left, n in new)):
            if not is_left:
                continue
            members = [*run]
            first, last = members[0], members[-1]
            pattern = group.part(first - numbers.start, last - numbers.start)
            digest = group.plan_digest
            if is_new:
                pattern = f"{folder}/{name}-{{{first:06d}..{last:06d}}}.tar"
                digest = hashlib.sha256(f"{digest} {folder}".encode()).hexdigest()
            yield write_table(
                partial(storage.writer, if_generation=ABSENT),
                f"{folder}/shards-{num_tables:06d}.npy",
                [left[number] for number in members],
                pattern=pattern,
                plan_digest=digest,
                promises=group.promises,
                seed=group.seed,
            )[0]
            num_tables += 1
