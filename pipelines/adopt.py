"""Makes a shard set of tars that others made, where they are: an index beside each tar, and a manifest."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import msgspec

from pipelines.config import AdoptConfig
from pipelines.runners.each import Show
from pipelines.sources.tar_index import index_tar
from pipelines.sources.webdataset import DEFAULT_SPLIT, find_tars, split_in, tars_of
from pipelines.write import tar_sets
from pipelines.write.tar_sets import TarRecord, Task, digest_of
from shardset.errors import ConfigError, SourceError
from shardset.format import naming
from shardset.format.columns import COLUMNS
from shardset.format.manifest import Manifest
from shardset.format.write import write_index
from shardset.storage.base import Storage
from shardset.storage.checked import read_again
from shardset.storage.open import open_storage

_NAME = re.compile(r"([^{}\\]*?)([0-9]{1,9})((?:-of-[0-9]+|[^0-9{}\\]*)\.tar)", re.ASCII)


def adopt(config: AdoptConfig, beam_flags: Sequence[str] = (), show: Show | None = None) -> Manifest:
    """Indexes the tars and publishes their manifest, of which it returns the head; a rerun keeps finished indexes.

    `quarantine.jsonl` lists what is no sample. Raises SourceError for a tar that can't be read to its end.
    """
    storage, tasks = _find(config)
    num_bytes = sum(task.source.num_bytes for task in tasks)
    index_each = partial(index, storage)
    records = tar_sets.ensure(storage, "adopt", tasks, index_each, beam_flags, (config.input, num_bytes), show)
    contents = [(task.split, record.written.shard) for task, record in zip(tasks, records, strict=True)]
    digest = digest_of([(split, shard.path, shard.sha256) for split, shard in contents])
    groups = [*_groups(tasks, records)]
    return tar_sets.publish(storage, "adopt", groups, digest, promises=[])


def index(storage: Storage, task: Task) -> TarRecord:
    """Writes the index of a tar; runs on a worker. Raises SourceError if the tar is damaged or holds no sample."""
    builder, odd = read_again(lambda: index_tar(storage, task.source))
    rows = builder.take_index()
    place = dict.fromkeys(("offset", "num_bytes", "sha256"))
    rejected = [
        {"name": f"{task.path}/{name}", "split": task.split, "reason": reason, "object": task.path, **place}
        for name, reason in odd
    ]
    if not len(rows):
        why = f" ({odd[0][0]}: {odd[0][1]})" if odd else ""
        raise SourceError(f"{storage.url}/{task.path}: holds no sample{why}; leave it out of --input")
    labels = Counter(rows["label"][rows["label"] >= 0].tolist())
    return TarRecord(
        written=write_index(task.path, builder, rows, storage.writer), labels=labels, rejected=rejected
    )  # fmt: skip


def _find(config: AdoptConfig) -> tuple[Storage, list[Task]]:
    """Where the manifest goes, and the tars in the order of their splits and numbers."""
    folder, names = find_tars(config.input)
    output = open_storage(config.output) if config.output else folder
    if not f"{folder.url}/".startswith(f"{output.url}/"):
        raise ConfigError(
            f"--output {config.output}: a manifest names tars in its own folder and below; give {folder.url}, a folder "
            "above it, or none; `build --source webdataset` copies tars to another place"
        )
    tasks = []
    for tar in tars_of(folder, names):
        split = config.split or split_in(tar.name) or DEFAULT_SPLIT
        if not naming.is_split(split):
            raise ConfigError(f"{split!r} can't name a split (letters, digits, - and _, not plan); give one by --split")
        if not tar.name.startswith(COLUMNS):
            path = f"{folder.url}/{tar.name}"[len(output.url) + 1 :]
            digest = digest_of(split, tar.generation, tar.num_bytes)
            tasks.append(Task(split, path, digest, msgspec.structs.replace(tar, name=path)))
    return output, sorted(tasks, key=lambda task: (task.split, _order_of(task.path)))


def _groups(tasks: Sequence[Task], records: Sequence[TarRecord]) -> Iterator[tuple[str, str, list[TarRecord]]]:
    """The tars of each split, in runs that a brace pattern names and whose indexes have the same fields."""

    def run(at: int) -> tuple[object, ...]:
        before, after, width, number = _order_of(tasks[at].path)
        return tasks[at].split, before, after, width, number - at, records[at].written.fields

    for (split, before, after, width, first, _), group in groupby(range(len(tasks)), run):
        ats = [*group]
        pattern = f"{before}{{{first + ats[0]:0{width}d}..{first + ats[-1]:0{width}d}}}{after}"
        yield split, pattern, [records[at] for at in ats]


def _order_of(name: str) -> tuple[str, str, int, int]:
    """What is before and after the number in the name of a tar, the digits and the value of the number."""
    found = _NAME.fullmatch(name)
    if found is None or not name.isascii() or not naming.is_relative(name):
        raise ConfigError(f"{name!r}: a manifest can't name this tar; rename it to ASCII with a number: train-0.tar")
    before, digits, after = found.groups()
    return before, after, len(digits), int(digits)
