"""Checks one shard: shallow by the checksums of its two objects, deep by comparing its tar with its
index.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pipelines.check.problems import Problem, problem_of
from pipelines.images.check import examine
from pipelines.images.options import ImageOptions
from shardset.checksum import crc32c_of
from shardset.errors import REPAIR, BadTarget, DamagedShard, StorageError, UndecodableImage
from shardset.format.annotations import boxes_in, is_coco
from shardset.format.images import is_image_field
from shardset.format.images.orientation import upright_size
from shardset.format.images.size import size_of
from shardset.format.manifest import IndexFile, Shard, Split
from shardset.format.rows import content_bytes, fields_of, numbers
from shardset.format.tar import TarMember, members, sample_members
from shardset.read.indexes import read_index
from shardset.storage.base import Storage
from shardset.storage.checked import DamagedObject, read_object, read_twice, stored_crc32c


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One shard to check, of a split; `is_own` if we wrote it. `categories` has the label of each
    category id, if the classes of the set have any. Pickles.

    `image` are the options to decode its images with.
    """

    storage: Storage
    split_name: str
    split: Split
    shard: Shard
    num_classes: int
    categories: Mapping[int, int]
    image: ImageOptions
    deep: bool
    is_own: bool


@dataclass(slots=True, kw_only=True)
class ShardFindings:
    """The findings of the check of one shard.

    `num_bytes` counts what was read. `keys`, `labels` (the samples of each, -1 for none) and
    `num_content_bytes` are of its index.
    """

    num_samples: int = 0
    num_images: int = 0
    num_bytes: int = 0
    num_content_bytes: int = 0
    keys: pa.Array = field(default_factory=lambda: pa.nulls(0, pa.large_string()))
    labels: Counter[int] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)

    def add(self, where: str, *sentences: str) -> None:
        """Adds one problem for each sentence."""
        self.problems += [Problem(where, sentence) for sentence in sentences]


def check_shard(task: ShardTask) -> ShardFindings:
    """The problems and totals of one shard. Runs in a thread or a process."""
    findings = ShardFindings(num_samples=task.shard.num_samples)
    if task.deep:
        _check_tar(task, _checked_index(task, findings), findings)
    else:
        for file in (task.shard, task.shard.index):
            _check_object(task.storage, file, findings)
    return findings


def _check_object(storage: Storage, file: Shard | IndexFile, findings: ShardFindings) -> None:
    def look() -> tuple[int, str | None]:
        stat = storage.stat(file.path)
        # An object of another size is wrong anyway; reading it would only take time.
        if stat.crc32c or stat.num_bytes != file.num_bytes:
            return stat.num_bytes, stat.crc32c
        findings.num_bytes += file.num_bytes
        return stat.num_bytes, stored_crc32c(storage, file.path, file.num_bytes)

    listed = file.num_bytes, file.crc32c
    try:
        num_bytes, crc32c = read_twice(look, lambda facts: facts == listed)
    except StorageError as error:
        findings.problems.append(problem_of(file.path, error))
        return
    if num_bytes != file.num_bytes:
        findings.add(file.path, f"{num_bytes} bytes, expected {file.num_bytes}; {REPAIR}")
    elif crc32c != file.crc32c:
        findings.add(
            file.path,
            f"its crc32c is {crc32c}, expected {file.crc32c}: bytes were changed; {REPAIR}",
        )


def _checked_index(task: ShardTask, findings: ShardFindings) -> pa.Table | None:
    """The index; None if it is damaged: only a sound one is worth comparing with the tar."""
    path = task.shard.index.path
    try:
        index = read_index(task.storage, task.shard)
    except (DamagedShard, StorageError) as error:
        findings.problems.append(problem_of(path, error))
        return None
    findings.num_bytes += task.shard.index.num_bytes
    findings.num_content_bytes = content_bytes(index)
    findings.labels = Counter(numbers(index, "label").tolist())
    if task.is_own:  # others may use a key in several tars
        findings.keys = index["key"].cast(pa.large_string()).combine_chunks()
    return index


def _check_tar(task: ShardTask, index: pa.Table | None, findings: ShardFindings) -> None:
    shard = task.shard
    try:
        tar = read_object(task.storage, shard.path, shard.num_bytes, shard.crc32c, REPAIR)
    except StorageError as error:
        findings.num_samples = 0
        findings.problems.append(problem_of(shard.path, error))
        return
    except DamagedObject as error:
        findings.problems.append(problem_of(shard.path, error))
        tar = error.data  # its samples tell which of them are damaged
    findings.num_bytes += len(tar)
    sha256 = hashlib.sha256(tar).hexdigest()
    if sha256 != shard.sha256:
        findings.add(
            shard.path,
            f"its SHA-256 is {sha256[:12]}…, the manifest says {shard.sha256[:12]}…; {REPAIR}",
        )
    if not task.is_own:  # written by others: only that it is still the tar that was indexed
        return
    walked: list[TarMember] = []
    try:
        for member in members(tar, shard.path):
            walked.append(member)
    except DamagedShard as error:
        findings.problems.append(problem_of(shard.path, error))
    groups = list(sample_members(walked))
    findings.num_samples = len(groups)
    if len(groups) != shard.num_samples:
        findings.add(
            shard.path,
            f"holds {len(groups)} samples, the manifest says {shard.num_samples}; {REPAIR}",
        )
    rows = [None] * len(groups) if index is None else index.to_pylist()
    for group, row in zip(groups, rows, strict=False):  # a different length has been reported
        contents = {
            member.field: tar[member.offset : member.offset + member.num_bytes] for member in group
        }
        findings.num_images += sum(map(is_image_field, contents))
        where = f"{shard.path}, sample {group[0].key}"
        findings.add(where, *_sample_problems(task, group, contents, row))


def _sample_problems(
    task: ShardTask,
    group: list[TarMember],
    contents: dict[str, bytes],
    row: dict[str, Any] | None,
) -> Iterator[str]:
    if len(contents) != len(group):
        yield f"has a field twice: {', '.join(member.field for member in group)}; {REPAIR}"
    fields = task.split.fields
    for unknown in sorted(contents.keys() - set(fields)):
        yield f"has a field {unknown!r}, the manifest lists {', '.join(fields)}; {REPAIR}"
    if row is not None:
        yield from _row_problems(task, group, contents, row)
    json = contents.get("json", b"")
    if is_coco(json) or (json and task.categories):
        try:
            boxes_in(json, task.categories)
        except BadTarget as error:
            yield f"its json: {error}; build the set again"
    size = (0, 0)
    for name in sorted(filter(is_image_field, contents), key=lambda name: "." in name):
        try:
            image = examine(
                contents[name], field=name, verify="decode", options=task.image, image_size=size
            )
            size = size if any(size) else upright_size(image.size, image.orientation)
        except UndecodableImage as error:
            yield f"its {name} can't be decoded: {error}; build again with --verify decode"


def _row_problems(
    task: ShardTask, group: list[TarMember], contents: dict[str, bytes], row: dict[str, Any]
) -> Iterator[str]:
    image = next((data for name, data in contents.items() if is_image_field(name)), b"")
    in_tar = {
        "crc32c": crc32c_of(*contents.values()),
        "image_crc32c": crc32c_of(image),
        "key": group[0].key,
    }
    # The index says null for a field that the sample lacks.
    ranges = dict.fromkeys(fields_of(row), (None, None)) | {
        member.field: (member.offset, member.num_bytes) for member in group
    }
    for name, (offset, num_bytes) in ranges.items():
        in_tar |= {f"{name}.offset": offset, f"{name}.bytes": num_bytes}
    in_tar["width"], in_tar["height"] = size_of(image)
    for column, value in in_tar.items():
        if row.get(column) != value:
            yield f"the index says {column} {row.get(column)}, the tar says {value}; {REPAIR}"
    label, text = row["label"], contents.get("cls", b"absent")
    if label != (int(text) if text.isdigit() else -1):
        yield f"the index says label {label}, but its cls field is {text!r}; {REPAIR}"
    if not -1 <= label < task.num_classes:
        yield f"its label is {label}, expected one of the {task.num_classes} classes; {REPAIR}"
    num_source = task.split.num_source_samples
    if row["serial"] >= num_source:
        yield f"the index says serial {row['serial']}, but the split has {num_source}; {REPAIR}"
