"""Forgets samples: writes their shards anew without them, publishes the next version, and removes the old files."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby

import msgspec
import numpy as np

from pipelines.plan import files as plan_files
from pipelines.plan import paths, tables
from pipelines.write import history, replace
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format import naming, versions
from shardset.format.index import index_fields
from shardset.format.manifest import Manifest, Shard, Split
from shardset.format.shards import Group
from shardset.format.tar import StoredSample
from shardset.format.write import WrittenShard, class_counts, write_shard, write_split
from shardset.program import count
from shardset.read.indexes import read_index
from shardset.storage.base import ABSENT, Stat, Storage, stat_or_none
from shardset.storage.checked import read_object
from shardset.storage.open import open_storage

_SINCE = f"{versions.FOLDER}removal.json"
"""When the old files of a compaction began to wait for their removal."""

_THREADS = 4
"""Shards that are written at the same time; each takes the memory of two."""

NOT_REACHED = (
    "not reached: object versions, soft-deleted objects and backups of the storage; copies of the set and caches of "
    "readers; views, columns and side files for other readers; the raw input; models that were trained on it"
)


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """What a compaction did: the newest version, how many samples that lost, and how many shards were written for it.

    `waiting` files of older versions are removed by the same call from `after` (ISO 8601) on; `removed` counts those
    that were, by folder, with `num_bytes`. `tags` name versions that go with them.
    """

    version: int
    num_samples: int
    num_shards: int
    waiting: int = 0
    after: str | None = None
    removed: dict[str, int] = {}
    num_bytes: int = 0
    tags: list[str] = []


def compact(url: str, keys: Collection[str], *, grace: timedelta, now: datetime) -> Compacted:
    """Publishes the version without the samples of these keys, and removes older versions that still have them.

    Files wait for `grace`, since readers that began on an older version end on it; the same call removes them later,
    or finishes one that was killed. Raises ConfigError without keys, for a split that would be empty, or an unfinished
    build.
    """
    storage = open_storage(url)  # not an older version of the set
    newest = manifests.read(storage)
    replace.manifest_at(storage, naming.MANIFEST)  # refuses adopted tars
    _refuse_unfinished(storage, newest)
    if not keys:
        raise ConfigError("no key was given; list those to drop, one in each line")
    wanted = np.array(sorted(key.encode() for key in keys))
    rows = {name: _kept_rows(storage, split, wanted) for name, split in newest.splits.items()}
    num_samples = sum(int((~kept).sum()) for touched in rows.values() for kept in touched.values())
    if num_samples:
        suffix = "-" + hashlib.sha256(b"\n".join([newest.digest.encode(), *wanted.tolist()])).hexdigest()[:8]
        splits = {
            name: _rewritten(storage, name, split, suffix, rows[name]) if rows[name] else split
            for name, split in newest.splits.items()
        }
        notes = [*newest.provenance.notes, f"version {newest.number + 1}: {count(num_samples, 'sample')} dropped"]
        provenance = msgspec.structs.replace(newest.provenance, notes=notes)
        compacted = msgspec.structs.replace(
            newest, digest="", number=newest.number + 1, splits=splits, provenance=provenance
        )
        storage.delete(_SINCE)  # first: with a note of an earlier compaction these files would not wait
        history.publish(storage, newest, manifests.seal(compacted))
    return _retire(storage, num_samples, sum(map(len, rows.values())), grace, now)


def lines(done: Compacted) -> list[str]:
    """The result as lines for a terminal."""
    found = [
        f"version {done.version}: {count(done.num_samples, 'sample')} dropped, "
        f"{count(done.num_shards, 'shard')} written anew"
    ]
    if done.waiting:
        found.append(f"{count(done.waiting, 'old file')} wait: give the same command again after {done.after}")
    if done.tags:
        found.append(f"tags of versions that {'wait' if done.waiting else 'were removed'}: {', '.join(done.tags)}")
    found += [f"removed from {folder or 'the set'}: {count(number, 'file')}" for folder, number in done.removed.items()]
    return [*found, f"removed {done.num_bytes / 1e6:,.1f} MB", NOT_REACHED] if done.removed else found


def _refuse_unfinished(storage: Storage, newest: Manifest) -> None:
    has_build, has_plan = (plan_files.generation_of(storage, name) != ABSENT for name in (paths.BUILD, paths.PLAN))
    if has_build and (not has_plan or history.has_unfinished_plan(storage, newest)):
        raise ConfigError(f"{storage.url}: holds an unfinished build or append; finish it first, with its own command")


def _kept_rows(storage: Storage, split: Split, wanted: np.ndarray) -> dict[int, np.ndarray]:
    """By number of each shard with samples of these keys, or copies of them: which of its rows to keep."""

    def kept(shard: Shard) -> np.ndarray:
        keys = np.char.partition(read_index(storage, shard)["key"], b"@")[:, 0]
        return ~np.isin(keys, wanted)

    found = enumerate(plan_files.in_order(storage, split.shards, kept))
    return {number: rows for number, rows in found if not rows.all()}


def _rewritten(storage: Storage, name: str, split: Split, suffix: str, touched: dict[int, np.ndarray]) -> Split:
    """A split without the rows of the touched shards that are not kept; writes these shards, and tables, anew."""
    folder, shards = name + suffix, list(split.shards)
    if len(touched) == len(shards) and not any(kept.any() for kept in touched.values()):
        raise ConfigError(f"{storage.url}: nothing would be left of split {name!r}; build a set without it instead")
    places = {number: place for place, number in enumerate(n for n, kept in touched.items() if kept.any())}

    def rewrite(number: int) -> tuple[Shard | None, np.ndarray]:
        path = naming.shard_path(folder, name, places.get(number, 0))
        return _rewrite(storage, shards[number], touched[number], path)

    with ThreadPoolExecutor(_THREADS) as threads:
        done = dict(zip(touched, threads.map(rewrite, touched), strict=True))
    new = {n: found[0] for n, found in done.items() if found[0]} | {n: s for n, s in enumerate(shards) if n not in done}
    dropped = [rows for _, rows in done.values()]
    labels, copies = (np.concatenate([rows[column] for rows in dropped]) for column in ("label", "copy"))
    totals = split.class_totals - class_counts(labels, len(split.class_totals))
    return msgspec.structs.replace(
        split,
        num_samples=split.num_samples - len(copies),
        num_dropped=split.num_dropped + int((copies == 0).sum()),
        num_repeats=split.num_repeats - int((copies > 0).sum()),
        num_content_bytes=split.num_content_bytes - sum(map(_content_bytes, dropped)),
        num_tar_bytes=sum(shard.num_bytes for shard in new.values()),
        max_tar_bytes=max(shard.num_bytes for shard in new.values()),
        max_index_bytes=max(shard.index.num_bytes for shard in new.values()),
        class_totals=totals.tolist(),
        shards=list(_groups(storage, name, split, folder, new, places, touched.keys())),
    )


def _rewrite(storage: Storage, shard: Shard, kept: np.ndarray, path: str) -> tuple[Shard | None, np.ndarray]:
    """The shard with the kept rows, if any are, which it writes to `path`; and the index rows of the others."""
    index = read_index(storage, shard)
    if not kept.any():
        return None, index
    advice = "restore the shard, or build it again, before samples are dropped"
    tar = memoryview(read_object(storage, shard.path, shard.num_bytes, shard.crc32c, advice))
    create = partial(storage.writer, if_generation=ABSENT)
    written, _ = write_shard(path, _samples_of(tar, index[kept]), index_fields(index), create)
    if file := plan_files.find(storage, naming.references_of(shard.path)):
        references = tables.references_from_bytes(file.content)
        if len(references) == len(kept):
            content = tables.references_to_bytes(tables.take(references, np.flatnonzero(kept)))
            plan_files.write(storage, naming.references_of(path), file.build, content, if_generation=ABSENT)
    return written.shard, index[~kept]


def _samples_of(tar: memoryview, index: np.ndarray) -> Iterator[StoredSample]:
    names = index.dtype.names or ()
    for values in index.tolist():
        row = dict(zip(names, values, strict=True))
        ranges = sorted((*row[f".{field}"], field) for field in index_fields(index) if row[f".{field}"][0])
        yield StoredSample(
            key=row["key"].decode("ascii"),
            fields=[(field, tar[start : start + size]) for start, size, field in ranges],
            label=row["label"],
            source=row["source"],
            copy=row["copy"],
        )


def _groups(
    storage: Storage, name: str, split: Split, folder: str, shards: Mapping[int, Shard], places: Mapping[int, int],
    touched: Collection[int],
) -> Iterator[Group]:  # fmt: skip
    """The groups of a split: each old one whole, or cut where its shards are written anew. Writes their tables."""
    start = num_tables = 0
    for group in split.groups:
        numbers = range(start, start + group.num_shards)
        start = numbers.stop
        if not any(number in touched for number in numbers):
            yield group
            continue
        promises = [promise for promise in group.promises if promise != "equal"]
        for is_new, run in groupby(numbers, key=touched.__contains__):
            members = [number for number in run if number in shards]
            if not members:
                continue
            pattern, digest = group.part(members[0] - numbers.start, members[-1] - numbers.start), group.plan_digest
            if is_new:
                pattern = f"{folder}/{name}-{{{places[members[0]]:06d}..{places[members[-1]]:06d}}}.tar"
                digest = hashlib.sha256(f"{digest} {folder}".encode()).hexdigest()
            table_path = f"{folder}/shards-{num_tables:06d}.npy"
            num_tables += 1
            with storage.writer(table_path, if_generation=ABSENT) as out:
                [made] = write_split(
                    out,
                    (WrittenShard(shards[number], (), 0) for number in members),
                    pattern=pattern,
                    table_path=table_path,
                    num_shards=len(members),
                    class_totals=[],
                    seed=group.seed,
                    plan_digest=digest,
                    promises=promises,
                ).groups
            yield msgspec.structs.replace(made, fields=group.fields)


def _content_bytes(index: np.ndarray) -> int:
    return sum(int(index[f".{field}"]["num_bytes"].sum()) for field in index_fields(index))


def _retire(storage: Storage, num_samples: int, num_shards: int, grace: timedelta, now: datetime) -> Compacted:
    """Removes the older versions with shards that the newest lacks, and what only these need, once `grace` is over."""
    newest = manifests.read_head(storage)
    listed, others = replace.files_of(newest), list(manifests.older(storage))
    stale = [one for one in others if not replace.files_of(one) - {one.quarantine.path} <= listed]
    for one in others:
        listed |= replace.files_of(one) if one not in stale else set()
    digests = {one.digest for one in stale}
    tags = [name for name, tag in sorted(versions.tags(storage).items()) if tag.digest in digests]
    done = Compacted(version=newest.number, num_samples=num_samples, num_shards=num_shards, tags=tags)
    if not stale:
        return done
    names = set[str]().union(*map(replace.files_of, stale)) - listed
    after = _waiting_since(storage, now) + grace
    if now < after:
        return msgspec.structs.replace(done, waiting=len(names), after=after.isoformat(timespec="minutes"))
    _refuse_unfinished(storage, newest)  # one that has begun meanwhile would lose its plan
    kept = set(map(naming.references_of, listed))
    names |= {stat.name for stat in storage.list(naming.PLAN_FOLDER) if paths.is_plan_file(stat.name)} - kept
    names |= {naming.catalog_of(name) for name in names if name.endswith(".tar")}
    names |= {naming.REPORT, *map(versions.tag_path, tags)}  # the page shows pictures of them
    removed = list(replace.existing(storage, names))
    last = list(replace.existing(storage, {_SINCE, *(versions.path(one.number) for one in stale)}))

    def delete(stat: Stat) -> None:
        storage.delete(stat.name, generation=stat.generation)

    for stats in (removed, last):  # a rerun needs the manifests to know which files are left
        for _ in plan_files.in_order(storage, stats, delete):
            pass
    folders = Counter(stat.name.rpartition("/")[0] for stat in [*removed, *last])
    return msgspec.structs.replace(done, removed=dict(folders), num_bytes=sum(stat.num_bytes for stat in removed))


def _waiting_since(storage: Storage, now: datetime) -> datetime:
    """When the old files began to wait: now, unless an earlier call has noted it."""
    if not (stored := stat_or_none(storage, _SINCE)):
        with storage.writer(_SINCE, if_generation=ABSENT) as out:
            out.write(json.dumps({"since": now.isoformat()}).encode())
        return now
    try:
        return datetime.fromisoformat(json.loads(storage.read(stored.name))["since"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{storage.url}/{_SINCE}: not readable; remove it, and old files wait anew") from error
