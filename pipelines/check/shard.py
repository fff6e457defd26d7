"""Checks one shard: shallow by the checksums of its two objects, deep by comparing its tar with its index."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipelines.check.duplicate_keys import hash_keys
from pipelines.check.problems import Problem, problem_of
from pipelines.images.check import examine
from pipelines.images.options import ImageOptions
from shardset.checksum import crc32c_of
from shardset.errors import DamagedShard, StorageError, UndecodableImage
from shardset.format import table
from shardset.format.images import is_image_field
from shardset.format.index import index_from_bytes
from shardset.format.manifest import IndexFile, Shard
from shardset.format.tar import TarMember, members, sample_members
from shardset.storage.base import Storage
from shardset.storage.checked import DamagedObject, facts_of, read_object, read_twice, stored_crc32c

_REBUILD = "rebuild the shard with --only-shards"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One shard to check; `fields` and `num_source_samples` are those of its split. Pickles.

    `image` are the options to decode its images with.
    """

    storage: Storage
    split: str
    shard: Shard
    fields: list[str]
    num_source_samples: int
    num_classes: int
    image: ImageOptions
    deep: bool


@dataclass(slots=True, kw_only=True)
class ShardFindings:
    """What the check of one shard found.

    `key_hashes` is uint64, one per sample in index order; `labels` counts the samples of each label, -1 for none.
    """

    num_samples: int = 0
    num_images: int = 0
    num_bytes: int = 0
    num_content_bytes: int = 0
    key_hashes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    problems: list[Problem] = field(default_factory=list)
    labels: Counter[int] = field(default_factory=Counter)

    def add(self, where: str, *sentences: str) -> None:
        """Adds one problem for each sentence."""
        self.problems += [Problem(where, sentence) for sentence in sentences]


def check_shard(task: ShardTask) -> ShardFindings:
    """The problems and totals of one shard. Runs in a thread or a process."""
    findings = ShardFindings()
    if task.deep:
        _check_deep(task, findings)
        return findings
    findings.num_samples = task.shard.num_samples
    for file in (task.shard, task.shard.index):
        _check_object(task.storage, file, findings)
    return findings


def _check_object(storage: Storage, file: Shard | IndexFile, findings: ShardFindings) -> None:
    try:
        stat = read_twice(
            lambda: storage.stat(file.path),
            lambda stat: stat.num_bytes == file.num_bytes and stat.crc32c in (None, file.crc32c),
        )
        crc32c = stat.crc32c
        # An object of another size is wrong anyway; reading it would only take time.
        if crc32c is None and stat.num_bytes == file.num_bytes:
            crc32c = read_twice(
                lambda: stored_crc32c(storage, file.path, file.num_bytes), lambda crc32c: crc32c == file.crc32c
            )
            findings.num_bytes += file.num_bytes
    except StorageError as error:
        findings.problems.append(problem_of(file.path, error))
        return
    findings.add(file.path, *_differences(file, stat.num_bytes, crc32c))


def _differences(file: Shard | IndexFile, num_bytes: int, crc32c: str | None) -> Iterator[str]:
    if num_bytes != file.num_bytes:
        yield f"holds {num_bytes} bytes, the manifest says {file.num_bytes}; {_REBUILD}"
    elif crc32c != file.crc32c:
        yield f"its CRC32C is {crc32c}, the manifest says {file.crc32c}: bytes were changed; {_REBUILD}"


def _check_deep(task: ShardTask, findings: ShardFindings) -> None:
    data, index = _read_whole(task.storage, task.shard.index, findings), None
    # A damaged index has been reported; only a sound one is worth comparing with the tar.
    if data is not None and not findings.problems:
        index = _parse_index(task.shard, data, findings)
    if index is not None:
        findings.key_hashes = hash_keys(index["key"])
    tar = _read_whole(task.storage, task.shard, findings)
    if tar is not None:
        _check_tar(task, tar, index, findings)


def _read_whole(storage: Storage, file: Shard | IndexFile, findings: ShardFindings) -> bytes | None:
    try:
        data = read_object(storage, file.path, file.num_bytes, file.crc32c, _REBUILD)
    except StorageError as error:
        findings.problems.append(problem_of(file.path, error))
        return None
    except DamagedObject as error:
        data = error.data
        findings.add(file.path, *_differences(file, *facts_of(data)))
    findings.num_bytes += len(data)
    return data


def _parse_index(shard: Shard, data: bytes, findings: ShardFindings) -> np.ndarray | None:
    path = shard.index.path
    try:
        index = index_from_bytes(data, path)
    except DamagedShard as error:
        findings.problems.append(problem_of(path, error))
        return None
    if len(index) != shard.num_samples:
        findings.add(path, f"lists {len(index)} samples, the manifest says {shard.num_samples}; {_REBUILD}")
    if len(wrong := np.flatnonzero(index["check"] != table.checks(index))):
        findings.add(path, f"{len(wrong)} rows do not fit their checks, the first is row {wrong[0]}; {_REBUILD}")
    return index


def _check_tar(task: ShardTask, tar: bytes, index: np.ndarray | None, findings: ShardFindings) -> None:
    shard, sha256 = task.shard, hashlib.sha256(tar).hexdigest()
    if sha256 != shard.sha256:
        findings.add(shard.path, f"its SHA-256 is {sha256[:12]}…, the manifest says {shard.sha256[:12]}…; {_REBUILD}")
    groups = _groups(shard.path, tar, findings)
    if len(groups) != shard.num_samples:
        findings.add(shard.path, f"holds {len(groups)} samples, the manifest says {shard.num_samples}; {_REBUILD}")
    rows: Iterable[dict[str, Any] | None] = [None] * len(groups)
    if index is not None:
        rows = (dict(zip(index.dtype.names or (), row, strict=True)) for row in index.tolist())
    for group, row in zip(groups, rows, strict=False):  # a different length has been reported
        _check_sample(task, tar, group, row, findings)
    findings.num_samples = len(groups)


def _check_sample(
    task: ShardTask, tar: bytes, group: list[TarMember], row: dict[str, Any] | None, findings: ShardFindings
) -> None:
    contents = {member.field: tar[member.offset : member.offset + member.num_bytes] for member in group}
    label = int(row["label"]) if row else _label_of(contents)
    findings.labels[-1 if label is None else label] += 1
    findings.num_content_bytes += sum(map(len, contents.values()))
    where = f"{task.shard.path}, sample {group[0].key}"
    findings.add(where, *_sample_problems(task, group, contents, row), *_image_problems(task, contents, findings))


def _groups(path: str, tar: bytes, findings: ShardFindings) -> list[list[TarMember]]:
    walked: list[TarMember] = []
    try:
        for member in members(tar, path):
            walked.append(member)
    except DamagedShard as error:
        findings.problems.append(problem_of(path, error))
    return list(sample_members(walked))


def _sample_problems(
    task: ShardTask, group: list[TarMember], contents: dict[str, bytes], row: dict[str, Any] | None
) -> Iterator[str]:
    if len(contents) != len(group):
        yield f"has a field twice: {', '.join(member.field for member in group)}; {_REBUILD}"
    for unknown in sorted(contents.keys() - set(task.fields)):
        yield f"has a field {unknown!r}, the manifest lists {', '.join(task.fields)}; {_REBUILD}"
    if row is not None:
        yield from _row_problems(group, contents, row)
        yield from _label_problems(int(row["label"]), contents, task.num_classes)
        if row["source"] >= task.num_source_samples:
            yield f"the index says source {row['source']}, but the split has {task.num_source_samples}; {_REBUILD}"


def _row_problems(group: list[TarMember], contents: dict[str, bytes], row: dict[str, Any]) -> Iterator[str]:
    # The index says (0, 0) for a field that the sample lacks.
    byte_ranges = {name: (0, 0) for name in row if name.startswith(".")}
    byte_ranges |= {f".{member.field}": (member.offset, member.num_bytes) for member in group}
    in_tar = {
        "offset": group[0].header_offset,
        "crc32c": crc32c_of(*contents.values()),
        "image_crc32c": crc32c_of(next((data for name, data in contents.items() if is_image_field(name)), b"")),
        "key": group[0].key.encode(),
        **byte_ranges,
    }
    for column, value in in_tar.items():
        if row.get(column) != value:
            yield f"the index says {column} {row.get(column)}, the tar says {value}; {_REBUILD}"


def _label_of(contents: dict[str, bytes]) -> int | None:
    text = contents.get("cls", b"")
    return int(text) if text.isdigit() else None


def _label_problems(label: int, contents: dict[str, bytes], num_classes: int) -> Iterator[str]:
    stored = _label_of(contents)
    if label >= 0 and stored is None:
        yield f"the index says label {label}, but its cls field is {contents.get('cls', b'absent')!r}; {_REBUILD}"
    elif stored is not None and stored != label:
        yield f"the index says label {label}, its cls field {stored}; {_REBUILD}"
    if not -1 <= label < num_classes:
        yield f"its label is {label}, expected one of the {num_classes} classes; {_REBUILD}"


def _image_problems(task: ShardTask, contents: dict[str, bytes], findings: ShardFindings) -> Iterator[str]:
    for name, content in contents.items():
        if not is_image_field(name):
            continue
        findings.num_images += 1
        try:
            examine(content, field=name.rpartition(".")[2], verify="decode", options=task.image)
        except UndecodableImage as error:
            yield f"its {name} can't be decoded: {error}; build again with --verify decode"
