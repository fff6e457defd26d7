"""Forgets samples: publishes a version without them; only the shards that held them are new."""

import hashlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.export.stale import CARD
from pipelines.plan import files as plan_files
from pipelines.plan import paths, tables
from pipelines.sets.keys import refuse_unknown
from pipelines.sets.retire import SINCE, Compacted, refuse_unfinished, retire, without
from pipelines.sets.samples_table import samples_table
from pipelines.sets.tar_sets import runs
from pipelines.write import history, replace
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import LoadedSet, Manifest, Quarantine, Shard, Split
from shardset.format.rows import (
    content_bytes,
    fields_of,
    first_images,
    keys_of,
    numbers,
    origins_of,
)
from shardset.format.shards import Group, StoredShards
from shardset.format.tar import StoredSample
from shardset.format.write import class_counts, write_shard, write_table
from shardset.program import count
from shardset.read.indexes import read_index
from shardset.read.query import contents_of
from shardset.storage.base import ABSENT, Storage
from shardset.storage.many import SHARDS_AT_ONCE, in_order

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
    rows = [index for of_split in dropped.values() for index in of_split.values()]
    held = {key.partition("@")[0] for index in rows for key in index["key"].to_pylist()}
    forgotten = {*newest.forgotten, *map(manifests.hash_of_key, held)}
    unknown = [key for key in keys if manifests.hash_of_key(key) not in forgotten]
    refuse_unknown(unknown, f"any version of {storage.url}")
    done = Compacted(
        num_samples=sum(map(len, rows)),
        num_shards=len(rows),
        same_images=_same_images(LoadedSet(newest, storage), rows) if rows else [],
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
    messages = [
        f"version {done.version}: {count(done.num_samples, 'sample')} dropped, "
        f"{count(done.num_shards, 'shard')} written again"
    ]
    if done.same_images:
        messages.append(
            f"the same images stay under other keys: {', '.join(done.same_images)}; drop these keys"
            " too"
        )
    if done.waiting:
        messages.append(
            f"{count(done.waiting, 'old file')} wait: give the same command again after"
            f" {done.after}"
        )
    if done.tags:
        what = "wait" if done.waiting else "were removed"
        messages.append(f"tags of versions that {what}: {', '.join(done.tags)}")
    if done.side_files:
        messages.append(
            f"may still name dropped samples or old tars: {', '.join(done.side_files)}; make them"
            f" again (`shardset export --overwrite`), or --side-files removes all but {CARD}, once"
            " nothing waits"
        )
    messages += [f"{note}; give the same command again when that is allowed" for note in done.kept]
    if done.removed:
        messages += [
            f"removed {count(sum(done.removed.values()), 'file')}, {done.num_bytes / 1e6:,.1f} MB",
            NOT_REACHED,
        ]
    return messages


def _find(storage: Storage, split: Split, wanted: np.ndarray) -> Dropped:
    """The samples of these keys, and copies of them."""

    def look(shard: Shard) -> pa.Table:
        index = read_index(storage, shard)
        return index.filter(np.isin(np.char.partition(keys_of(index), b"@")[:, 0], wanted))

    indexes = enumerate(in_order(storage.reads_at_once, split.shards, look))
    return {number: rows for number, rows in indexes if len(rows)}


def _same_images(whole: LoadedSet, dropped: Sequence[pa.Table]) -> list[str]:
    """The keys of samples that stay, though their images are equal to dropped ones."""
    image = ["image_crc32c", "bytes"]
    images = pa.concat_tables(
        pa.table({"image_crc32c": rows["image_crc32c"], "bytes": first_images(rows)[1]})
        for rows in dropped
    )
    keys = pa.concat_tables(rows.select(["key"]) for rows in dropped)["key"]
    same_keys: list[str] = []
    for split in whole.manifest.splits:
        samples = samples_table(whole, split, facts=("key", "image_crc32c"))
        is_left = pc.and_(
            pc.greater(samples["bytes"], 0), pc.invert(pc.is_in(samples["key"], keys))
        )
        same = samples.filter(is_left).join(images, image, join_type="left semi")
        same_keys += same.sort_by("id")["key"].to_pylist()
    return same_keys


def _rewritten(storage: Storage, name: str, split: Split, folder: str, dropped: Dropped) -> Split:
    """A split without the dropped rows; writes the shards that lose some, and tables,
    to `folder`.
    """
    shards = list(split.shards)

    def rewrite(number: int) -> Shard:
        path = naming.shard_path(folder, name, number)
        return _rewrite(storage, shards[number], keys_of(dropped[number]), path)

    changed = [number for number in dropped if len(dropped[number]) < shards[number].num_samples]
    new = dict(zip(changed, in_order(SHARDS_AT_ONCE, changed, rewrite), strict=True))
    left = {number: shard for number, shard in enumerate(shards) if number not in dropped} | new
    rows = pa.concat_tables(dropped.values(), promote_options="default")
    copies = numbers(rows, "copy")
    totals = split.class_totals - class_counts(numbers(rows, "label"), len(split.class_totals))
    return msgspec.structs.replace(
        split,
        num_samples=split.num_samples - len(copies),
        num_dropped=split.num_dropped + int((copies == 0).sum()),
        num_repeats=split.num_repeats - int((copies > 0).sum()),
        num_content_bytes=split.num_content_bytes - content_bytes(rows),
        num_tar_bytes=sum(shard.num_bytes for shard in left.values()),
        max_tar_bytes=max(shard.num_bytes for shard in left.values()),
        class_totals=totals.tolist(),
        shards=StoredShards([*_groups(storage, split, folder, left)]),
    )


def _rewrite(storage: Storage, shard: Shard, dropped: np.ndarray, path: str) -> Shard:
    """The shard without the dropped keys, which it writes to `path`."""
    index = read_index(storage, shard)
    kept = index.filter(~np.isin(keys_of(index), dropped))
    create = partial(storage.writer, if_generation=ABSENT)
    written, _ = write_shard(
        path, _samples_of(storage, shard, kept), fields_of(kept.column_names), create
    )
    # for `repair`
    if file := plan_files.find(storage, paths.references_path(shard.path)):
        references = tables.from_bytes(file.content, tables.REFERENCE)
        is_kept = np.isin(index["key"], kept["key"])
        content = tables.to_bytes(tables.take(references, np.flatnonzero(is_kept)))
        name = paths.references_path(path)
        plan_files.write(storage, name, file.build, content, if_generation=ABSENT)
    return written.shard


def _samples_of(storage: Storage, shard: Shard, rows: pa.Table) -> Iterator[StoredSample]:
    """The samples of some rows of the index of a shard."""
    contents = contents_of(storage, shard, rows)
    for row, origin, fields in zip(rows.to_pylist(), origins_of(rows), contents, strict=True):
        facts = {name: row[name] for name in ("key", "label", "serial", "copy")}
        yield StoredSample(fields=fields, origin=origin, **facts)


def _groups(
    storage: Storage, split: Split, folder: str, left: Mapping[int, Shard]
) -> Iterator[Group]:
    """The groups of a split with the shards that are left: each old one whole, or cut where shards
    are new or gone.

    Writes the tables of those that are cut.
    """
    shards = [left[number] for number in sorted(left)]
    groups = [split.shards.group_of(number) for number in sorted(left)]
    tables = itertools.count()
    for pattern, places in runs([shard.path for shard in shards], groups):
        group = groups[places.start]
        if pattern == group.shards:
            yield group
            continue
        digest = group.plan_digest
        if pattern.startswith(f"{folder}/"):
            digest = hashlib.sha256(f"{digest} {folder}".encode()).hexdigest()
        yield write_table(
            partial(storage.writer, if_generation=ABSENT),
            f"{folder}/shards-{next(tables):06d}.npy",
            shards[places.start : places.stop],
            pattern=pattern,
            plan_digest=digest,
            promises=group.promises,
            seed=group.seed,
        )[0]
