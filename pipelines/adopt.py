"""Makes a shard set of tars that others made, where they are: an index beside each tar, and a manifest."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

import msgspec

from pipelines.config import AdoptConfig
from pipelines.plan.files import in_order
from pipelines.runners.each import Show
from pipelines.sources.tar_index import index_stored
from pipelines.sources.webdataset import DEFAULT_SPLIT, find_tars, split_in, tars_of
from pipelines.write import tar_sets
from pipelines.write.tar_sets import TarRecord, Task, digest_of
from shardset.errors import ChangedInput, ConfigError, SourceError
from shardset.format import naming
from shardset.format.columns import COLUMNS
from shardset.format.index import MAX_FIELDS, with_fields
from shardset.format.manifest import Manifest
from shardset.format.write import put_index, write_index
from shardset.read.indexes import read_index
from shardset.storage.base import Storage
from shardset.storage.checked import read_again
from shardset.storage.open import open_storage

_NAME = re.compile(r"([^{}\\]*?)([0-9]{1,9})((?:-of-[0-9]+|[^0-9{}\\]*)\.tar)", re.ASCII)
_NO_PLACE = dict.fromkeys(("offset", "num_bytes", "sha256"))
_SHOWN = 5


def adopt(config: AdoptConfig, beam_flags: Sequence[str] = (), show: Show | None = None) -> Manifest:
    """Indexes the tars and publishes their manifest, of which it returns the head.

    A rerun keeps the indexes of tars that have not changed. Raises SourceError if something can't be read exactly, all
    of which `quarantine.jsonl` lists, unless `on_bad` says to leave it out.
    """
    storage, splits = _find(config)
    tasks = [task for tasks in splits.values() for task in tasks]
    num_bytes = sum(task.source.num_bytes for task in tasks)
    records = tar_sets.ensure(
        storage, "adopt", tasks, partial(index, storage), beam_flags, source=config.input, num_bytes=num_bytes,
        show=show,
    )  # fmt: skip
    found = {task.path: record for task, record in zip(tasks, records, strict=True)}
    rejected = [
        {"name": name, "split": split, "reason": reason, "object": task.path, **_NO_PLACE}
        for split, tasks in splits.items()
        for task in tasks
        for name, reason in found[task.path].rejected
    ]
    kept = {split: [task for task in tasks if found[task.path].written] for split, tasks in splits.items()}
    if rejected and (config.on_bad == "fail" or not all(kept.values())):
        tar_sets.put_rejected(storage, rejected)
        first = "; ".join(f"{entry['name']}: {entry['reason']}" for entry in rejected[:_SHOWN])
        raise SourceError(
            f"{storage.url}: {len(rejected)} can't be read exactly, {naming.quarantine_path()} lists all: {first}; "
            "repair the tars, or leave these out with --on-bad quarantine"
        )
    shards = [(split, task.path, found[task.path].written) for split, tasks in splits.items() for task in tasks]
    digest = digest_of([(split, path, written and written.shard.sha256) for split, path, written in shards])
    groups = {split: [*_groups(tasks, _widened(storage, tasks, found))] for split, tasks in kept.items()}
    return tar_sets.publish(storage, "adopt", groups, digest, {"on_bad": config.on_bad}, rejected=rejected)


def index(storage: Storage, task: Task) -> TarRecord:
    """Writes the index of a tar, unless nothing of it can be in the set; runs on a worker."""
    try:
        builder, odd = read_again(lambda: index_stored(storage, task.source))
        rows, why = builder.take_index(), "it holds no sample"
    except ChangedInput:  # the next run may read it
        raise
    except SourceError as error:
        rows, odd, why = (), [], str(error).removeprefix(f"{storage.url}/{task.path}: ")
    rejected = [(f"{task.path}/{name}", reason) for name, reason in odd]
    if not len(rows):
        return TarRecord(written=None, rejected=[*rejected, (task.path, why)])
    return TarRecord(
        written=write_index(task.path, builder, rows, storage.writer),
        labels=Counter(rows["label"][rows["label"] >= 0].tolist()),
        rejected=rejected,
    )


def _find(config: AdoptConfig) -> tuple[Storage, dict[str, list[Task]]]:
    """Where the manifest goes, and the tars of each split in their order."""
    folder, names = find_tars(config.input)
    output = open_storage(config.output) if config.output else folder
    if not f"{folder.url}/".startswith(f"{output.url}/"):
        raise ConfigError(
            f"--output {config.output}: a manifest names tars in its own folder or below it, and their indexes lie "
            f"beside them; give {folder.url} or a folder above it, or copy the set there by `build --source webdataset`"
        )
    below = f"{folder.url}/"[len(output.url) + 1 :]
    splits: dict[str, list[Task]] = {}
    for tar in sorted(tars_of(folder, names), key=lambda tar: _order_of(tar.name)):
        split = config.split or split_in(tar.name) or DEFAULT_SPLIT
        if not naming.is_split(split):
            raise ConfigError(f"{split!r} can't name a split (letters, digits, - and _, not plan); give one by --split")
        if not tar.name.startswith(COLUMNS):
            tar = msgspec.structs.replace(tar, name=below + tar.name)
            splits.setdefault(split, []).append(Task(tar.name, digest_of(tar.generation, tar.num_bytes), tar))
    return output, splits


def _widened(storage: Storage, tasks: Sequence[Task], found: Mapping[str, TarRecord]) -> list[TarRecord]:
    """The records of a split; each index gets the columns of all fields of the split."""
    all_written = [record.written for task in tasks if (record := found[task.path]).written]
    fields = list(dict.fromkeys(field for written in all_written for field in written.fields))
    if len(fields) > MAX_FIELDS:
        raise SourceError(f"{storage.url}: its samples have {len(fields)} fields, such as {fields[-1]}; expected few")

    def widened(task: Task) -> TarRecord:
        record = found[task.path]
        if not (written := record.written) or written.fields == fields:
            return record
        rows = with_fields(read_index(storage, written.shard), fields)
        shard = msgspec.structs.replace(
            written.shard, index=put_index(written.shard.index.path, rows, storage.writer)
        )  # fmt: skip
        written = written._replace(shard=shard, fields=fields)
        return tar_sets.put(storage, task, msgspec.structs.replace(record, written=written))

    return [*in_order(storage, tasks, widened)]


def _groups(tasks: Sequence[Task], records: Sequence[TarRecord]) -> Iterator[tuple[str, list[TarRecord]]]:
    """The tars of a split, in runs that a brace pattern names."""

    def run(at: int) -> tuple[str, str, int, int]:
        before, after, width, number = _order_of(tasks[at].path)
        return before, after, width, number - at

    for (before, after, width, first), group in groupby(range(len(tasks)), run):
        ats = [*group]
        pattern = f"{before}{{{first + ats[0]:0{width}d}..{first + ats[-1]:0{width}d}}}{after}"
        yield pattern, [records[at] for at in ats]


def _order_of(name: str) -> tuple[str, str, int, int]:
    """What is before and after the number in the name of a tar, the digits and the value of the number."""
    found = _NAME.fullmatch(name)
    if found is None or not name.isascii() or not naming.is_relative(name):
        raise ConfigError(f"{name!r}: a manifest can't name this tar; rename it to ASCII with a number: train-0.tar")
    before, digits, after = found.groups()
    return before, after, len(digits), int(digits)
