"""Makes a shard set of tars that others made, where they are: an index beside each tar, and a manifest."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

import msgspec

from pipelines.config import AdoptConfig
from pipelines.plan.files import in_order
from pipelines.runners.each import Show, for_each
from pipelines.sources.tar_index import IndexedTar, index_stored
from pipelines.sources.webdataset import DEFAULT_SPLIT, find_tars, split_in, tars_of
from pipelines.write import tar_sets
from pipelines.write.tar_sets import TarGroup, TarRecord
from shardset.errors import ConfigError, SourceError
from shardset.format import naming
from shardset.format.columns import COLUMNS
from shardset.format.index import index_array, with_fields
from shardset.format.manifest import Manifest
from shardset.format.write import put_index, write_index
from shardset.read.indexes import read_index
from shardset.storage.base import Stat, Storage
from shardset.storage.checked import read_again

SOURCE = "adopt"
"""The `provenance.source` of adopted sets."""

_NAME = re.compile(r"([^{}\\]*?)([0-9]{1,9})((?:-of-[0-9]+|[^0-9{}\\]*)\.tar)", re.ASCII)
_SHOWN = 5


def adopt(config: AdoptConfig, beam_flags: Sequence[str] = (), show: Show | None = None) -> Manifest:
    """Indexes the tars and publishes their manifest, of which it returns the head; both lie beside the tars.

    A rerun keeps the indexes of tars that have not changed. Raises SourceError if something can't be read exactly, all
    of which `quarantine.jsonl` lists, unless `on_bad` says to leave it out.
    """
    storage, names = find_tars(config.input)
    done = tar_sets.published(storage, SOURCE)
    tars = [tar for tar in tars_of(storage, names) if not tar.name.startswith(COLUMNS)]
    tars.sort(key=lambda tar: _order_of(tar.name))
    splits: dict[str, list[str]] = {}
    for tar in tars:
        splits.setdefault(config.split or split_in(tar.name) or DEFAULT_SPLIT, []).append(tar.name)
    if odd := [split for split in splits if not naming.is_split(split)]:
        raise ConfigError(f"{odd[0]!r} can't name a split (letters, digits, - and _, not plan); give one with --split")
    find = partial(_find, storage)
    new = [tar for tar, record in zip(tars, in_order(storage, tars, find), strict=True) if record is None]
    num_bytes = sum(tar.num_bytes for tar in new)
    for_each(partial(index, storage), new, beam_flags, storage, source=config.input, num_bytes=num_bytes, show=show)
    found = zip(tars, in_order(storage, tars, find), strict=True)
    records = {tar.name: record for tar, record in found if record}
    if len(records) < len(tars):
        raise SourceError(f"{storage.url}: a tar changed while it was adopted; run the same command again")
    provenance = tar_sets.provenance_of(SOURCE, _digest(splits, records), on_bad=config.on_bad)
    if done and done.provenance == provenance:
        return done
    if done:
        raise ConfigError(f"{storage.url}: adopted before, with other tars; remove {naming.MANIFEST} to adopt these")
    rejected = [*_rejected(splits, records)]
    kept = {split: [name for name in names if records[name].shard] for split, names in splits.items()}
    if rejected and (config.on_bad == "fail" or not all(kept.values())):
        tar_sets.put_rejected(storage, rejected)
        first = "; ".join(f"{entry['name']}: {entry['reason']}" for entry in rejected[:_SHOWN])
        raise SourceError(
            f"{storage.url}: {len(rejected)} can't be read exactly, {naming.quarantine_path()} lists all: {first}; "
            "repair the tars, or leave these out with --on-bad quarantine"
        )
    groups = {split: [*_groups(names, _widened(storage, names, records))] for split, names in kept.items()}
    return tar_sets.publish(storage, groups, provenance, promises=[], rejected=rejected)


def index(storage: Storage, tar: Stat) -> None:
    """Writes the index and the record of a tar, unless they are there; runs on a worker."""
    if _find(storage, tar):
        return
    try:
        indexed = read_again(lambda: index_stored(storage, tar))
        why = "" if indexed.rows else "it holds no sample"
    except SourceError as error:
        indexed, why = IndexedTar(0), str(error).removeprefix(f"{storage.url}/{tar.name}: ")
    rejected = [(f"{tar.name}/{name}", reason) for name, reason in indexed.rejected]
    if why:
        tar_sets.put(storage, tar.name, TarRecord(made_from=_made_from(tar), rejected=[*rejected, (tar.name, why)]))
        return
    rows = index_array(indexed.rows, indexed.fields)
    shard, fields, num_content_bytes = write_index(tar.name, indexed, rows, storage.writer)
    record = TarRecord(
        made_from=_made_from(tar),
        shard=shard,
        fields=list(fields),
        num_content_bytes=num_content_bytes,
        labels=Counter(rows["label"][rows["label"] >= 0].tolist()),
        rejected=rejected,
    )
    tar_sets.put(storage, tar.name, record)


def _widened(storage: Storage, names: Sequence[str], records: Mapping[str, TarRecord]) -> list[TarRecord]:
    """The records of a split; each index gets the columns of all fields of the split."""
    fields = list(dict.fromkeys(field for name in names for field in records[name].fields))

    def widened(name: str) -> TarRecord:
        record = records[name]
        if record.fields == fields or record.shard is None:
            return record
        rows = with_fields(read_index(storage, record.shard), fields)
        file = put_index(record.shard.index.path, rows, storage.writer)
        shard = msgspec.structs.replace(record.shard, index=file)
        return tar_sets.put(storage, name, msgspec.structs.replace(record, shard=shard, fields=fields))

    return [*in_order(storage, names, widened)]


def _groups(names: Sequence[str], records: Sequence[TarRecord]) -> Iterator[TarGroup]:
    """The tars of a split, in runs that a brace pattern names."""

    def run(at: int) -> tuple[str, str, int, int]:
        before, after, width, number = _order_of(names[at])
        return before, after, width, number - at

    for (before, after, width, first), group in groupby(range(len(names)), run):
        ats = [*group]
        pattern = f"{before}{{{first + ats[0]:0{width}d}..{first + ats[-1]:0{width}d}}}{after}"
        yield TarGroup(pattern, [records[at] for at in ats])


def _order_of(name: str) -> tuple[str, str, int, int]:
    """What is before and after the number in the name of a tar, the digits and the value of the number."""
    found = _NAME.fullmatch(name)
    if found is None or not name.isascii() or not naming.is_relative(name):
        raise ConfigError(f"{name!r}: a manifest can't name this tar; rename it to ASCII with a number: train-0.tar")
    before, digits, after = found.groups()
    return before, after, len(digits), int(digits)


def _find(storage: Storage, tar: Stat) -> TarRecord | None:
    return tar_sets.find(storage, tar.name, _made_from(tar))


def _made_from(tar: Stat) -> list[str]:
    return [tar_sets.TOOL, tar.generation, str(tar.num_bytes)]


def _digest(splits: Mapping[str, Sequence[str]], records: Mapping[str, TarRecord]) -> str:
    """Stands for the splits, the names of the tars, and their contents."""
    shards = [(split, name, records[name].shard) for split, names in splits.items() for name in names]
    return hashlib.sha256(repr([(*names, shard and shard.sha256) for *names, shard in shards]).encode()).hexdigest()


def _rejected(splits: Mapping[str, Sequence[str]], records: Mapping[str, TarRecord]) -> Iterator[dict[str, str | None]]:
    for split, names in splits.items():
        for tar in names:
            for name, reason in records[tar].rejected:
                place = dict.fromkeys(("offset", "num_bytes", "sha256"))
                yield {"name": name, "split": split, "reason": reason, "object": tar, **place}
